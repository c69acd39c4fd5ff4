"""The commands, one file a group; each is a thin layer over `align.api` and its neighbours."""
