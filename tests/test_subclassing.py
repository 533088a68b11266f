"""A subclass made at run time: named as the user's class, found again below it, and made again where a pickle is loaded."""

from __future__ import annotations

import copy
import functools
import pickle

from apexfx.subclassing import reduced, source_class, subclass


class Loud:
    def greet(self):
        return super().greet() + "!"

    def __reduce_ex__(self, protocol):
        return reduced(super(), self, Loud, loud, protocol)


@functools.cache
def loud(cls):
    return subclass(cls, Loud)


class User:
    """What the user wrote."""

    def __init__(self, name):
        self.name = name

    def greet(self):
        return f"hello {self.name}"


def test_copies_and_pickles_are_of_the_class_made_again():
    made = loud(User)("Ann")
    assert (type(made).__name__, type(made).__doc__, made.greet()) == ("User", "What the user wrote.", "hello Ann!")
    copies = [copy.copy(made), copy.deepcopy(made), *(pickle.loads(pickle.dumps(made, protocol)) for protocol in (0, 2, 5))]
    assert all(type(other) is type(made) and other.greet() == "hello Ann!" for other in copies)


def test_the_class_below_the_mixin():
    class Outer:
        pass

    assert source_class(loud(User), Loud) is User and source_class(User, Loud) is User
    assert source_class(subclass(loud(User), Outer), Loud) is User
