"""What a step asks of its process: cached functions, addresses, strides, the environment."""

from __future__ import annotations

from tests.harness.traps.grammar import EQUAL, REFUSED, Family
from tests.harness.traps.trap import DDP, PLAIN

asking = Family("asking", EQUAL)
TWO = {"shapes": ((20, 12), (12, 20))}

# -- caches ----------------------------------------------------------------------------------------

IDENTITY = {"outside": "@functools.lru_cache\ndef identity(size):\n    return torch.eye(size)"}
asking("cache-of-numbers")("""
    outside:
        @functools.lru_cache
        def root(number):
            return float(number**-0.5)
    scale: root(len(param))
""")
# Nobody writes the tensor that the function returns.
asking("cache-of-tensors", REFUSED, **IDENTITY, **TWO)("""
    param:
        if not state:
            state["average"] = torch.zeros_like(param)
        state["average"].lerp_(grad, 0.1)
    update: identity(len(param)) @ cube(state["average"])
""")
asking("cache-of-a-decorator", REFUSED, says="results", **TWO)("""
    outside:
        def kept_in_dict(function):
            results = {}

            @functools.wraps(function)
            def known(size):
                if size not in results:
                    results[size] = function(size)
                return results[size]

            known.results = results
            return known

        @kept_in_dict
        def doubled(size):
            return torch.eye(size) * 2
    update: doubled(len(param)) @ cube(grad)
""")
asking("cache-on-itself", REFUSED, **IDENTITY, **TWO)("""
    begin: self.identity = identity
    update: self.identity(len(param)) @ cube(grad)
""")
asking("cache-in-a-module", REFUSED, **TWO)("""
    update: tests.harness.traps.kit.identity(len(param)) @ cube(grad)
    after: tests.harness.traps.kit.identity.cache_clear()
""")
# Parameters of one shape write the tensor that the function returns.
asking("cache-of-buffers", REFUSED)("""
    outside:
        @functools.lru_cache
        def buffer(shape):
            return torch.zeros(shape)
    param:
        shared = buffer(tuple(param.shape))
        shared.lerp_(grad, 0.1)
    update: cube(shared)
""")

# -- addresses and strides -------------------------------------------------------------------------

SLOW = '{p.data_ptr() for p in self.param_groups[0]["params"][:2]}'
KNOWN = {"says": "address", "scale": "0.5 if param.data_ptr() in self.slow else 1.0"}
asking("address-in-set", REFUSED, **KNOWN, begin=f"self.slow = {SLOW}")
ODD_IN_COLUMNS = {
    "start": "value.t().contiguous().t() if place % 2 else value",
    "layouts": (PLAIN, DDP),  # FSDP2 takes no parameter that lies in columns
}
STRIDES = {"says": "strides"}
CONTIGUOUS = {"scale": "1.0 if grad.is_contiguous() else 0.5"}
ODD_TURNED = "for param in params[1::2]:\n    param.grad = turn(param.grad)"
IN_COLUMNS = {"says": "line 2 or 3", "scale": "1.0 if param.is_contiguous() else 0.5", **ODD_IN_COLUMNS}
asking("contiguous-parameter", REFUSED, **IN_COLUMNS)
asking("contiguous-gradient", REFUSED, **STRIDES, **CONTIGUOUS, every=ODD_TURNED)
asking("contiguous-gradient-never-turned", **CONTIGUOUS)
asking("stride-of-gradient", REFUSED, **STRIDES, scale="1.0 if grad.stride(-1) == 1 else 0.5", every=ODD_TURNED)

# -- the environment -------------------------------------------------------------------------------

SET = 'os.environ["CANZONA_TRAP_HABIT"] = "2" if step >= 2 else "1"'
asking("variable-by-getenv", scale='float(os.getenv("CANZONA_TRAP_HABIT", "1"))', every=SET)
