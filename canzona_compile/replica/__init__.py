"""Copies of optimizers: what they hold, what may be copied, and what is watched between steps.

What it means that something changed, by where it lies. "Follow" means that the next step sees it.

Between steps, with who looks:

    value of a group           homes.signature    float: follow, and capture again at zero; else capture again
    number that steps count    nobody             the step writes it
    number on self             ChangeWatch        follow
    other plain value on self  ChangeWatch        follow and rehearse again, three times at most
    inside of self's values    ChangeWatch        number: follow; else rehearse again; with own objects refuse
    number, text on a param    ChangeWatch        plan again
    other value on a param     ChangeWatch        rehearse again
    form of the state          leaves.leaf_forms  another kind of parameter

During a step, as rehearsals and captures find out:

    number beside the state    step_alone         it counts steps; anything but a number is refused
    global, closure, class     Outside            refuse, and put back; generators of Python and numpy as well
    torch's generators         randomness         the owner of a matrix draws, with a warning
"""
