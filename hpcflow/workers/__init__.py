"""The rank side of models: the command loop, and the classes whose methods the controller calls."""
