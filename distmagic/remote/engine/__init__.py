"""torchrun, started by exec or forked from a template."""
