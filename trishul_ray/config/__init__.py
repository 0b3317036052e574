"""The fields of an experiment, by section, and the storage paths of the machine."""
