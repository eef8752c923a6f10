"""Rewards: one file for each, and `compose`, which turns several into one verdict."""
