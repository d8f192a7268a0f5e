"""Interop: models of other libraries whose gradients are views of an arena. Nothing else here imports those libraries.

Each module needs the library that it is named after, and says so when it is used; importing it does not.
"""
