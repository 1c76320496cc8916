"""What does a step cost, and what energy does it take, in words? Per trillion tokens, and for the run if it is said."""

from clustersim.common.units import Grams, Watts, format_energy, format_number, format_power, format_seconds
from clustersim.hardware.prices import Price
from clustersim.results.economics import Economics
from clustersim.scenario.settings import USER_STATED

UNKNOWN = "unknown"


def money(amount: float, currency: str) -> str:
    """An amount for people.

    >>> money(17_441_531.7, "USD"), money(2.49, "EUR")
    ('17,440,000 USD', '2.49 EUR')
    """
    return f"{format_number(amount)} {currency}"


def tokens_words(tokens: float) -> str:
    """Tokens as people write them.

    >>> tokens_words(15.6e12), tokens_words(3e11), tokens_words(2.5e6)
    ('15.6T', '300B', '2.5M')
    """
    size, unit = next(
        ((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if tokens >= size), (1.0, "")
    )
    return f"{tokens / size:.4g}{unit}"


def tonnes(carbon: Grams) -> str:
    """CO2 for people.

    >>> tonnes(733.6e6)
    '733.6 t CO2'
    """
    return f"{format_number(carbon / 1e6)} t CO2"


def cost_line(found: Economics) -> tuple[str, str, str]:
    """Name, value and meaning of what a trillion tokens cost."""
    price, cost = found.price_per_gpu_hour, found.cost_per_trillion_tokens
    if price is None or cost is None:
        return "cost", UNKNOWN, "; ".join(found.without_price)
    words = f"per trillion tokens, {_per_hour(price, found)}"
    if found.cost_of_run is not None:
        words += f"; {money(found.cost_of_run, price.currency)} for the run"
    return "cost", money(cost, price.currency), words


def energy_line(found: Economics) -> tuple[str, str, str]:
    """Name, value and meaning of what energy a trillion tokens take."""
    energy = found.energy_per_trillion_tokens
    if energy is None or found.gpu_power is None or found.power_per_gpu is None:
        return "energy", UNKNOWN, "; ".join(found.without_power)
    words = f"per trillion tokens; {_drawn(found, found.gpu_power, found.power_per_gpu)}"
    if found.carbon_per_trillion_tokens is not None:
        words += f"; {tonnes(found.carbon_per_trillion_tokens)}"
    if found.energy_of_run is not None:
        carbon = "" if found.carbon_of_run is None else f", {tonnes(found.carbon_of_run)}"
        words += f"; {format_energy(found.energy_of_run)}{carbon} for the run"
    return "energy", format_energy(energy), words


def run_lines(found: Economics, gpu_hours: float) -> list[tuple[str, str]]:
    """Value and meaning of what the run takes, or where its tokens are not said, a trillion: time, and money if known.

    gpu_hours: for a trillion tokens.
    """
    if found.run_tokens is None or found.time_of_run is None:
        cost, words = found.cost_per_trillion_tokens, "per trillion tokens, "
        lines = [(f"{gpu_hours:,.0f} GPU\N{NO-BREAK SPACE}hours", "per trillion tokens")]
    else:
        cost, words, tokens = found.cost_of_run, "at ", tokens_words(found.run_tokens)
        lines = [(format_seconds(found.time_of_run), f"for {tokens} tokens: steps alone, without failures")]
    if (price := found.price_per_gpu_hour) is not None and cost is not None:
        lines.append((money(cost, price.currency), f"{words}{_per_hour(price, found)}"))
    return lines


def price_words(found: Economics) -> str:
    """What a GPU hour costs, and who says so; empty where no price is known."""
    price = found.price_per_gpu_hour
    return "" if price is None else f"{money(price.amount, price.currency)} per GPU hour: {found.price_source}"


def power_words(found: Economics) -> str:
    """What the job draws, and what of it is missing; empty where it is not known."""
    if found.power is None:
        return ""
    facility = f", PUE {found.pue:g}" if found.pue > 1.0 else ""
    return "; ".join([f"{format_power(found.power)} for the job{facility}", *found.without_node])


def _per_hour(price: Price, found: Economics) -> str:
    listed = "" if found.price_source == USER_STATED else " (list)"
    return f"{money(price.amount, price.currency)}/GPU h{listed}"


def _drawn(found: Economics, gpu: Watts, whole: Watts) -> str:
    node = f", {whole:,.0f} W in all" if whole > gpu else ""
    facility = f", PUE {found.pue:g}" if found.pue > 1.0 else ""
    return f"{gpu:,.0f} W/GPU{node}{facility}"
