"""Phantoms: tensors with shape, dtype and device and no data, standing for what another stage holds.

The one idea: on stage s the user's step runs as written. What other stages computed is a `Phantom`; arithmetic between
Phantoms is arithmetic on shapes, so masks, position ids and views come out right without a transfer. At the stage's
first block the Phantoms among its arguments are *bound* to the values the previous stage sent, and from then on reading
a bound Phantom reads the value, gradients included. What was computed from Phantoms remembers how, so that a stage that
needs it after all can compute it from values that it gets. A Phantom that is read and has no value raises: it is never
silently wrong.

    stand_in   what is known of a tensor that another stage holds
    recipes    how one was computed from others
    shapes     what an operator gives, from shapes alone
    writes     what may not be written
    errors     what is raised, in words
    phantom    what happens when one is used: from here on they act
    foreign    parameters of other stages, and their gradients
    outside    what may be done with those outside their modules
"""
