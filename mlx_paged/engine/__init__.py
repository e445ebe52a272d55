"""Which tokens run in each step, and what comes out: continuous batching over one pool."""
