"""The speculative engine: pages, scheduler, drafters, verification. It measures, and it dumps the
states."""
