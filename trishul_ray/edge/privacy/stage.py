"""The stage ``privacy``: differential privacy of each client."""

from collections.abc import Sequence

from trishul_ray.edge.privacy.accounting import Guarantee, affordable, change_noise, guarantee
from trishul_ray.edge.privacy.clipping import Clip
from trishul_ray.edge.privacy.config import PrivacyConfig, refusal
from trishul_ray.edge.ring import Ring
from trishul_ray.edge.server_optimizer import ServerConfig
from trishul_ray.methods.base import Method
from trishul_ray.stages import Change, Sender, Stage, StageSettings, register_stage
from trishul_ray.version import AUDIT_NUMERICS


@register_stage("privacy")
class Privacy(Stage):
    """Clients clip their changes, and the server releases their noisy mean."""

    Config, wire, moves_beyond_mean = PrivacyConfig, 4, True
    config: PrivacyConfig

    def check(self, method: Method) -> None:
        """Refuse what the accounting does not cover."""
        federation = self.settings.federation
        refused = refusal(
            self.config,
            clients=federation.participants,
            cohort=federation.clients_per_round,
            weighting=federation.weighting,
            server=self.settings.section(ServerConfig).optimizer,
        )
        if refused is not None:
            raise ValueError(refused)
        if (plan := method.survey_plan) is not None and plan.decides_adapters:
            raise ValueError(
                f"privacy: {self.settings.method_as_set} lets what clients measure before round 1 "
                "decide the adapters, in clear; allowed for trishul: method.allocation="
                "waterfill or uniform"
            )

    @property
    def versions(self) -> dict[str, int]:
        """The number of the audit, if there is one."""
        return {"audit_numerics": AUDIT_NUMERICS} if self.config.canaries else {}

    @property
    def reads_rounds(self) -> bool:
        """The noise that an epsilon needs depends on the number of rounds."""
        return self.config.epsilon is not None

    def rounds(self, rounds: int) -> int:
        """Return as many rounds as ``privacy.budget`` pays."""
        fed, seed, surveys = self.settings.federation, self.settings.seed, self.settings.surveys
        clients, cohort = fed.participants, fed.clients_per_round
        return affordable(self.config, seed, clients, cohort, rounds, surveys)

    def send(self, change: Change, sender: Sender) -> Change:
        """Return the clipped change; the norm leaves room for rounding in fixed point."""
        server = self.settings.section(ServerConfig)
        ring = server.sum == "ring"
        return Clip(Ring(server.fraction_bits, 1).step / 2 if ring else 0.0)(change, sender)

    def prepare(self) -> Sequence[str]:
        """Find the noise before anything is written."""
        promised(self.settings)
        return ()


def promised(settings: StageSettings, noise: float | None = None) -> Guarantee:
    """Return what a private experiment promises each client.

    Args:
        settings: The experiment; its section ``privacy`` is on.
        noise: z of a run that has begun; None finds it.

    Raises:
        InputError: No noise that is tried keeps the promise, or dp-accounting is missing.
    """
    fed, options = settings.federation, settings.section(PrivacyConfig)
    if noise is not None:
        options = options.model_copy(update={"epsilon": None, "noise": noise})
    clients, cohort, surveys = fed.participants, fed.clients_per_round, settings.surveys
    found = guarantee(options, settings.seed, clients, cohort, fed.rounds, surveys)
    change_noise(options, found)  # the private count must leave some of it
    return found
