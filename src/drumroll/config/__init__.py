"""Config files: sections in `models`, reading and checking in `load`. Imports neither torch nor ray."""
