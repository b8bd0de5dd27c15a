"""The EAGLE head (arXiv 2401.15077): a projection of [embedding ; state] and one decoder layer.

    z_p = W [E x_{p+1+k} ; h]                      z: [N, H], W: [H, 2H] (`fc`), no bias
    g_p = layer(z)_p                               its attention reads z itself, without a norm
    q_p = softmax(lm_head g_p)                     E and lm_head: the target's

That is the MTP head's module with the four norms left out, which is how it was published; each norm
can be put back by its switch (`NormConfig`), and with all four it is one recycled MTP module. The
state fed at step 0 is the target's after its final norm; recycled is g.
"""

from __future__ import annotations

from .mtp import MTPHead


class EagleHead(MTPHead):
    """See the module's equations and `protocol.Head`."""

    kind = "eagle"
