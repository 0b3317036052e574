"""Contract checks of methods, adapters, stages, datasets and tasks, as plain functions.

``trishul check --plugin mine.py`` runs them on a user's plug-in file, including from an installed
package. The tests of this package run the same functions on everything that is registered.
"""
