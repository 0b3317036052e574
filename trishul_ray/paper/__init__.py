"""The TRISHUL paper beside finished runs: its printed numbers, its claims, its bounds.

A plug-in of the platform: nothing outside this folder imports it, or names what is in it. Entry
points in ``pyproject.toml`` make what it registers known.
"""
