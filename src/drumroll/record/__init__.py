"""What a run leaves behind and how it is shown: its folder, the trajectory store, metrics, the live view and the report.

One recorder process writes; anything else may read while the run goes on. Everything on disk is JSON, YAML, SQLite,
msgpack or PNG.
"""
