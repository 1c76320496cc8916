"""How are cost and energy of training written as text?

Per trillion tokens, and for the training run if its tokens are given.
"""

from clustersim.common.units import Grams, Watts, format_energy, format_number, format_power, format_seconds
from clustersim.hardware.prices import Price
from clustersim.results.economics import Economics
from clustersim.scenario.settings import USER_STATED

UNKNOWN_LABEL = "unknown"


def format_money(amount: float, currency: str) -> str:
    """Amount of money as text.

    >>> format_money(17_441_531.7, "USD"), format_money(2.49, "EUR")
    ('17,440,000 USD', '2.49 EUR')
    """
    return f"{format_number(amount)} {currency}"


def format_tokens(tokens: float) -> str:
    """Token count with a unit.

    >>> format_tokens(15.6e12), format_tokens(3e11), format_tokens(2.5e6)
    ('15.6T', '300B', '2.5M')
    """
    size, unit = next(
        ((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if tokens >= size), (1.0, "")
    )
    return f"{tokens / size:.4g}{unit}"


def format_carbon(carbon: Grams) -> str:
    """CO2 mass in tonnes as text.

    >>> format_carbon(733.6e6)
    '733.6 t CO2'
    """
    return f"{format_number(carbon / 1e6)} t CO2"


def cost_row(economics: Economics) -> tuple[str, str, str]:
    """Name, value and meaning of the cost of a trillion tokens."""
    price, cost = economics.price_per_gpu_hour, economics.cost_per_trillion_tokens
    if price is None or cost is None:
        return "cost", UNKNOWN_LABEL, "; ".join(economics.missing_prices)
    meaning = f"per trillion tokens, {_describe_hourly_price(price, economics)}"
    if economics.run_cost is not None:
        meaning += f"; {format_money(economics.run_cost, price.currency)} for the run"
    return "cost", format_money(cost, price.currency), meaning


def energy_row(economics: Economics) -> tuple[str, str, str]:
    """Name, value and meaning of the energy of a trillion tokens."""
    energy = economics.energy_per_trillion_tokens
    if energy is None or economics.gpu_power is None or economics.power_per_gpu is None:
        return "energy", UNKNOWN_LABEL, "; ".join(economics.missing_power)
    meaning = f"per trillion tokens; {_describe_power_draw(economics, economics.gpu_power, economics.power_per_gpu)}"
    if economics.carbon_per_trillion_tokens is not None:
        meaning += f"; {format_carbon(economics.carbon_per_trillion_tokens)}"
    if economics.run_energy is not None:
        carbon = "" if economics.run_carbon is None else f", {format_carbon(economics.run_carbon)}"
        meaning += f"; {format_energy(economics.run_energy)}{carbon} for the run"
    return "energy", format_energy(energy), meaning


def training_run_rows(economics: Economics, gpu_hours: float) -> list[tuple[str, str]]:
    """Value and meaning of the training run's time and cost; per trillion tokens if the run's tokens are not given.

    gpu_hours: for a trillion tokens.
    """
    if economics.run_tokens is None or economics.run_seconds is None:
        cost, prefix = economics.cost_per_trillion_tokens, "per trillion tokens, "
        rows = [(f"{gpu_hours:,.0f} GPU\N{NO-BREAK SPACE}hours", "per trillion tokens")]
    else:
        cost, prefix, tokens = economics.run_cost, "at ", format_tokens(economics.run_tokens)
        rows = [(format_seconds(economics.run_seconds), f"for {tokens} tokens: steps only, without failures")]
    if (price := economics.price_per_gpu_hour) is not None and cost is not None:
        rows.append((format_money(cost, price.currency), f"{prefix}{_describe_hourly_price(price, economics)}"))
    return rows


def describe_price(economics: Economics) -> str:
    """Price of a GPU hour and its source; empty if no price is known."""
    price = economics.price_per_gpu_hour
    return (
        "" if price is None else f"{format_money(price.amount, price.currency)} per GPU hour: {economics.price_source}"
    )


def describe_power(economics: Economics) -> str:
    """Power of the job, and which shares of it are missing; empty if unknown."""
    if economics.power is None:
        return ""
    facility = f", PUE {economics.pue:g}" if economics.pue > 1.0 else ""
    return "; ".join([f"{format_power(economics.power)} for the job{facility}", *economics.missing_node_power])


def _describe_hourly_price(price: Price, economics: Economics) -> str:
    source_note = "" if economics.price_source == USER_STATED else " (list)"
    return f"{format_money(price.amount, price.currency)}/GPU h{source_note}"


def _describe_power_draw(economics: Economics, gpu_power: Watts, total_power: Watts) -> str:
    node = f", {total_power:,.0f} W total" if total_power > gpu_power else ""
    facility = f", PUE {economics.pue:g}" if economics.pue > 1.0 else ""
    return f"{gpu_power:,.0f} W/GPU{node}{facility}"
