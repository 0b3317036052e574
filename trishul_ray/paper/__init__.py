"""The TRISHUL paper: its printed numbers, and the choices that it leaves open.

No module outside this folder imports it or refers to its content.
"""

#: Modules that register something, keyed by the field of the registry.
MODULES = {"reference": ("numbers",)}
