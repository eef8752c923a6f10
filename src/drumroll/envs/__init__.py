"""Environments: `base` says what one is; every other module or folder here holds one."""
