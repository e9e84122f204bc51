"""The commands on storage. Each module has `run`, to which the command of that name hands a `find.Target`."""
