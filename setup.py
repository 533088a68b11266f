"""Builds the pure-Python package, and the compiled ops wherever torch and a compiler are at hand."""

from setuptools import setup

setup()
