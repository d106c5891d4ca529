"""One node's job: starts torchrun, gathers what ranks say, ends every process."""
