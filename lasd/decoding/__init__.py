"""The engine: draft trees, one target forward pass, acceptance, cache. It knows no drafting method by name."""
