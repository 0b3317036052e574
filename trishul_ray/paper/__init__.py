"""The TRISHUL paper: its printed numbers, and what it leaves open.

Nothing outside this folder imports it, or names its content.
"""

#: The modules that register something, by the field of its registry.
MODULES = {"reference": ("numbers",)}
