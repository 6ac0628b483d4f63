"""The catalogue of a fleet: what ships, changed by the fleet's own configuration, and checked against it."""

from quartet_bus.config.check import ConfigError, closest, spell
from quartet_bus.config.schema import Config
from quartet_core.catalogue import Catalogue, UnknownProfile, WrongEntry, builtin

WHERE = "configuration"


def load(config: Config) -> Catalogue:
    """The built-in catalogue merged with ``[hardware.*]`` and ``[specs.*]``.

    Raises ``ConfigError`` for hardware that cannot be read, and when a ``[models.*]`` names a ``spec``, a
    ``[cost.price_per_hour]`` a class, or an engine of this host a model, class or profile that does not exist.
    """
    try:
        catalogue = builtin().merge({"hardware": config.hardware, "models": config.specs})
    except WrongEntry as wrong:
        key = "specs." + wrong.key.removeprefix("models.") if wrong.key.startswith("models.") else wrong.key
        raise ConfigError(WHERE, key, wrong.reason, f"keys: {', '.join(wrong.allowed)}") from wrong
    except ValueError as wrong:
        raise ConfigError(WHERE, "hardware", str(wrong), "a profile must rise with its work") from wrong
    for name, model in config.models.items():
        if model.spec not in catalogue.models:
            raise _unknown(("models", name, "spec"), model.spec, tuple(catalogue.models))
        if model.base and model.base not in config.models:
            raise _unknown(("models", name, "base"), model.base, tuple(config.models))
    for hardware in config.cost.price_per_hour:
        if hardware not in catalogue.hardware:
            raise _unknown(("cost", "price_per_hour", hardware), hardware, tuple(catalogue.hardware))
    for index, engine in enumerate(config.agent.engines):
        path = ("agent", f"engines[{index}]")
        if engine.model not in config.models:
            raise _unknown((*path, "model"), engine.model, tuple(config.models))
        if engine.hardware not in catalogue.hardware:
            raise _unknown((*path, "hardware"), engine.hardware, tuple(catalogue.hardware))
        try:
            catalogue.profile(engine.hardware, config.models[engine.model].spec, engine.precision, engine.tp)
        except UnknownProfile as unknown:
            raise ConfigError(
                WHERE, spell(path), unknown.what, f"not known; known: {', '.join(unknown.allowed)}"
            ) from None
    return catalogue


def _unknown(path: tuple[str, ...], name: str, known: tuple[str, ...]) -> ConfigError:
    hint = closest(name, known) or f"known: {', '.join(sorted(known)) or 'none'}"
    return ConfigError(WHERE, spell(path), name, f"does not exist; {hint}")
