"""Generated names of experiments."""

from __future__ import annotations

_QUALITIES = """
    able amber ample apt azure bold brave brief bright brisk calm candid clear clever cosy crisp curious deft eager
    fair famous fine firm fond frank free fresh gentle glad golden good grand green happy hardy honest humble jolly keen
    kind lively loyal lucky mellow merry mild modest neat nimble noble plain proud quick quiet rapid ready rosy silent
    simple smooth snug sober solid spry steady sunny swift tidy tall tender trusty vivid warm wary wise witty young
"""
_ANIMALS = """
    adder ant badger bat bear beaver bee bison boar bream carp cat cod crane crow deer dingo dove duck eagle eel elk emu
    falcon finch fox frog gecko gnu goose gull hare hawk hen heron horse ibex ibis jay koala lark lemur lion lynx mole
    moose moth mouse newt orca otter owl panda perch pike pony puma quail raven robin salmon shrew skunk sloth snail
    stork swan tapir teal tern tiger toad trout tuna turtle viper vole wasp whale wolf wombat wren yak zebra
"""


def generate_name(digest: int) -> str:
    """Return two words and a number, the same for the same ``digest``."""
    qualities = _QUALITIES.split()
    animals = _ANIMALS.split()
    rest, first = divmod(digest, len(qualities))
    rest, second = divmod(rest, len(animals))
    return f"{qualities[first]}-{animals[second]}-{rest % 1000:03}"
