"""How are cost and energy of training written as text?

Per trillion tokens, and for the training run if its tokens are given.
"""

from clustersim.common.units import Grams, Watts, format_energy, format_number, format_power, format_seconds
from clustersim.hardware.prices import PriceQuote
from clustersim.results.economics import Economics
from clustersim.results.utilization import TRILLION_TOKENS

UNKNOWN_LABEL = "unknown"


def format_money(amount: float, currency: str) -> str:
    """Amount of money as text.

    >>> format_money(17_441_531.7, "USD"), format_money(2.49, "EUR")
    ('17,440,000 USD', '2.49 EUR')
    """
    return f"{format_number(amount)} {currency}"


def format_rounded_amount(amount: float) -> str:
    """Amount of money to a tenth of a percent or so, short enough for a narrow column.

    >>> format_rounded_amount(302_900_000.0), format_rounded_amount(1.35e9), format_rounded_amount(8123.4)
    ('302.9M', '1.35B', '8.123k')
    """
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if amount >= size), (1.0, "")
    )
    return f"{amount / size:.4g}{unit}"


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
    """Name, value and meaning of the cost of a trillion tokens, and of the run if its tokens are given.

    At a contract price, the meaning has the costs at the list price as well.
    """
    if economics.price_per_gpu_hour is None:
        return "cost", UNKNOWN_LABEL, "; ".join(economics.missing_prices)
    used, *compared = economics.price_quotes
    meaning = [f"per trillion tokens, {describe_quote(used)}{_describe_run_cost(economics, used)}"]
    meaning += [
        f"{_cost_of_tokens(economics, quote, TRILLION_TOKENS)} at {describe_quote(quote)}"
        f"{_describe_run_cost(economics, quote)}"
        for quote in compared
    ]
    return "cost", _cost_of_tokens(economics, used, TRILLION_TOKENS), "; ".join(meaning)


def _describe_run_cost(economics: Economics, quote: PriceQuote) -> str:
    tokens = economics.run_tokens
    return "" if tokens is None else f"; {_cost_of_tokens(economics, quote, tokens)} for the run"


def _cost_of_tokens(economics: Economics, quote: PriceQuote, tokens: float) -> str:
    return format_money(economics.step_cost_at(quote.price) * tokens / economics.tokens, quote.price.currency)


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
        priced_tokens, prefix = TRILLION_TOKENS, "per trillion tokens, "
        rows = [(f"{gpu_hours:,.0f} GPU\N{NO-BREAK SPACE}hours", "per trillion tokens")]
    else:
        priced_tokens, prefix, tokens = economics.run_tokens, "at ", format_tokens(economics.run_tokens)
        rows = [(format_seconds(economics.run_seconds), f"for {tokens} tokens: steps only, without failures")]
    rows += [
        (_cost_of_tokens(economics, quote, priced_tokens), f"{prefix}{describe_quote(quote)}")
        for quote in economics.price_quotes
    ]
    return rows


def describe_price(economics: Economics) -> str:
    """Prices of a GPU hour and their sources; empty if no price is known."""
    return ". ".join(f"{describe_quote(quote)}: {quote.source}" for quote in economics.price_quotes)


def describe_power(economics: Economics) -> str:
    """Power of the job, and which shares of it are missing; empty if unknown."""
    if economics.power is None:
        return ""
    facility = f", PUE {economics.pue:g}" if economics.pue > 1.0 else ""
    return "; ".join([f"{format_power(economics.power)} for the job{facility}", *economics.missing_node_power])


def describe_quote(quote: PriceQuote) -> str:
    """The price of a GPU hour, and which price it is.

    >>> from clustersim.hardware.prices import Price
    >>> describe_quote(PriceQuote(Price(2.49, "USD"), "OCI"))
    '2.49 USD/GPU h (list price)'
    """
    return f"{format_money(quote.price.amount, quote.price.currency)}/GPU h ({quote.kind.value} price)"


def _describe_power_draw(economics: Economics, gpu_power: Watts, total_power: Watts) -> str:
    node = f", {total_power:,.0f} W total" if total_power > gpu_power else ""
    facility = f", PUE {economics.pue:g}" if economics.pue > 1.0 else ""
    return f"{gpu_power:,.0f} W/GPU{node}{facility}"
