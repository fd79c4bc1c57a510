"""A model of the protocol that runs the library's own rules: every interleaving and every crash of small worlds.

    World, State    what takes part, and everything at one moment           `world`
    Protocol        the library's answers, and mutants that answer wrongly   `protocol`, `mutants`
    Steps           what can happen next, and what has to be true            `steps`, `drivers`, `tasks`, ...
    Together, ...   several states of one topology                           `together`
    Replans, ...    checkpoints that are copied and put back                 `replans`
    Following, ...  a state with a change log, and who follows it            `following`
    Forgetting, ... a key that operators make a state forget                 `forgetting`
    Correcting, ... a past that operators correct                            `correcting`
    Swapping, ...   an alias that operators swap between two versions       `swapping`
    Parts, ...      functions that give a batch in parts                     `parts`
    Rolling, ...    rolling windows, whose values are tiles                  `rolling`, `rolling_tiles`
    WindowWorld     windows in random worlds, by the library's own tasks     `windows`, `window_mutants`
    explore, walk   every state of a small world, long ways through others   `explore`

``python -m model`` runs all of it. docs/model.md says what is modelled and what is not.
"""

from model.correcting import Correcting
from model.explore import Explored, explore, walk
from model.following import Following
from model.forgetting import Forgetting
from model.mutants import MUTANTS, Mutant
from model.parts import Parts
from model.protocol import Protocol
from model.replans import Replans
from model.swapping import Swapping
from model.together import Together
from model.world import World
from model.worlds import LARGE, SMALL, WIDE

__all__ = [
    "LARGE",
    "MUTANTS",
    "SMALL",
    "WIDE",
    "Correcting",
    "Explored",
    "Following",
    "Forgetting",
    "Mutant",
    "Parts",
    "Protocol",
    "Replans",
    "Swapping",
    "Together",
    "World",
    "explore",
    "walk",
]
