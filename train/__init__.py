"""Pipelines that train what the decoder plugs in. Part of the repository, never of the wheel."""
