"""Datasets: rows of files, folders and hub ids as tasks and demonstrations, and the order they are drawn in."""
