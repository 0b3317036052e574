"""The fields of an experiment, their sections, and the folders of the machine."""
