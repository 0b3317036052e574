"""Checks of every method, adapter, dataset and task, as plain functions.

``trishul check --plugin mine.py`` runs them on a file of your own, from an installed package, too.
The tests of this package run the same functions on all that is registered.
"""
