"""The algorithms: one file each, readable on one screen, and the tensor maths they name in their configs."""
