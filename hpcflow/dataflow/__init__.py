"""The controller side: worker groups as objects, batches as handles, transfer protocols, the trace of a run."""
