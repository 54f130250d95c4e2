"""Find under its old name what :mod:`agentsgym.credit.ema` now holds, for one version."""

from agentsgym._renamed import renamed

__getattr__ = renamed(__name__, {"MovingBaselines": "agentsgym.credit.ema.EMABaselines"})
