"""The lines of the comparison: every method, and the variants that answer a question."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    Attributes:
        label: for people.
        method: name in the registry.
        settings: what differs from the method's defaults.
        tuned: False for a variant that takes over the learning rate of its method.
        asked: True for a variant that is run only where it is named.
    """

    label: str
    method: str
    settings: tuple[str, ...] = ()
    tuned: bool = True
    asked: bool = False


_FROZEN = ("model.train_head=false",)
_BF16 = ("model.precision=bf16",)

#: By the name they have on the command line, in the order of the table.
VARIANTS = {
    "fullft": Variant("Full-FT", "fullft"),
    "fedit": Variant("FedIT", "fedit"),
    "fedprox": Variant("FedProx", "fedprox", tuned=False),
    "fedex": Variant("FedEx-LoRA", "fedex"),
    "ffalora": Variant("FFA-LoRA", "ffalora"),
    "fedsb": Variant("Fed-SB", "fedsb"),
    "scaffold": Variant("SCAFFOLD+LoRA", "scaffold"),
    "flora": Variant("FLoRA", "flora"),
    "hetlora": Variant("HetLoRA", "hetlora"),
    "flexlora": Variant("FlexLoRA", "flexlora"),
    # The published RAVAN draws each head's bases for itself; its Gram-Schmidt form is the nearer
    # neighbour of TRISHUL, whose bases are jointly orthonormal.
    "ravan": Variant("RAVAN", "ravan"),
    "ravan-gs": Variant("RAVAN Gram-Schmidt", "ravan", ("adapter.init=gram_schmidt",), False),
    # Under Adam the paper's λ = 0.01 shrinks a core by about a thousandth of a step; λ = 1 bites.
    "trishul": Variant("TRISHUL λ=0.01", "trishul", ("method.lam=0.01",)),
    "trishul-1": Variant("TRISHUL λ=1", "trishul", ("method.lam=1.0",), False),
    # What a method does to the adapter, without what it does to a head that has all to learn.
    "fedit-frozen": Variant("FedIT, frozen head", "fedit", _FROZEN, asked=True),
    "scaffold-frozen": Variant("SCAFFOLD+LoRA, frozen head", "scaffold", _FROZEN, asked=True),
    "trishul-frozen": Variant("TRISHUL λ=0.01, frozen head", "trishul", _FROZEN, asked=True),
    # HetLoRA by the letter of its formula, where a component that nobody sent becomes zero.
    "hetlora-zero": Variant(
        "HetLoRA, unsent zero", "hetlora", ("method.unsent=zero",), False, asked=True
    ),
    # Whether what FedEx folds into the frozen weight outlives bf16.
    "fedit-bf16": Variant("FedIT, bf16", "fedit", _BF16, False, asked=True),
    "fedex-bf16": Variant("FedEx-LoRA, bf16", "fedex", _BF16, False, asked=True),
}


def rate_of(name: str, chosen: dict[str, float]) -> float:
    """The learning rate of a variant: its own, or that of the variant its method was tuned on.

    FedProx with a small μ is FedIT with a pull; it takes FedIT's rate.
    """
    variant = VARIANTS[name]
    if name in chosen:
        return chosen[name]
    return chosen["fedit" if variant.method == "fedprox" else variant.method]


def tuned_for(names: list[str]) -> list[str]:
    """The variants whose learning rate must be found for ``names`` to be run, in table order."""
    wanted = set()
    for name in names:
        variant = VARIANTS[name]
        if variant.tuned:
            wanted.add(name)
        else:
            wanted.add("fedit" if variant.method == "fedprox" else variant.method)
    return [name for name in VARIANTS if name in wanted]
