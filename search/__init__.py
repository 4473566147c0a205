"""Search pipelines: choose a draft tree (and, for layer skipping, a skip set) for one model on one machine."""
