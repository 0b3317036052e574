"""Plug-ins: the registry, plug-in files, and entry points of installed packages."""
