"""The public command line options: scripts rely on them, so changes need a line in CHANGELOG.md."""

import typer.main

from clustersim.cli.app import app

OPTIONS = {
    "run": [
        "FILE",
        "--set",
        "--json",
        "--html",
        "--trace",
        "--kineto",
        "--spans",
        "--ranks",
        "--force",
        "--what-if",
        "--quiet",
        "-q",
        "--watch",
        "--allow-code",
        "--limit",
        "--help",
    ],
    "check": ["FILE", "--set", "--quiet", "-q", "--help"],
    "coverage": ["FILE", "--set", "--json", "--all", "--allow-code", "--help"],
    "diff": [
        "A",
        "[B]",
        "--set",
        "--json",
        "--html",
        "--what-if",
        "--quiet",
        "-q",
        "--allow-code",
        "--limit",
        "--help",
    ],
    "explore": ["FILE", "--html", "--set", "--workers", "--allow-code", "--limit", "--help"],
    "search": [
        "FILE",
        "--set",
        "--objective",
        "--gpus",
        "--batch-per-gpu",
        "--clusters",
        "--fix",
        "--vary",
        "--headroom",
        "--top",
        "--workers",
        "--executor",
        "--resume",
        "--json",
        "--html",
        "--what-if",
        "--quiet",
        "-q",
        "--allow-code",
        "--limit",
        "--help",
    ],
    "diloco": [
        "FILE",
        "--set",
        "--days",
        "--utilization",
        "--json",
        "--html",
        "--quiet",
        "-q",
        "--allow-code",
        "--help",
    ],
    "goodput": [
        "FILE",
        "--set",
        "--tokens",
        "--runs",
        "--seed",
        "--workers",
        "--resume",
        "--json",
        "--html",
        "--quiet",
        "-q",
        "--allow-code",
        "--limit",
        "--help",
    ],
    "import": ["PROGRAM", "FILE", "--set", "--define", "--cluster", "--gpus", "--out", "--output", "--help"],
    "export": ["PROGRAM", "FILE", "--set", "--out", "--output", "--force", "--allow-code", "--help"],
    "explain": ["FILE", "--measured", "--set", "--json", "--what-if", "--allow-code", "--help"],
    "validate": [
        "KIND FILE.csv | show CASE_ID",
        "--json",
        "--html",
        "--workers",
        "--only",
        "--set",
        "--quiet",
        "-q",
        "--limit",
        "--help",
    ],
    "calibrate": [],  # all options are parsed by `calibrate.command`
    "schema": ["--markdown", "--help"],
    "presets": ["--help"],
    "topology": ["NAME", "--set", "--gpus", "--html", "--allow-code", "--help"],
}


def test_commands_and_options() -> None:
    group = typer.main.get_command(app)
    commands = getattr(group, "commands")  # noqa: B009 - typer's own click is not typed
    options = {}
    for name, command in commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        options[name] = [option for parameter in command.get_params(context) for option in _option_names(parameter)]
    assert options == OPTIONS


def _option_names(parameter: object) -> list[str]:
    if parameter.param_type_name == "argument":  # type: ignore[attr-defined]
        return [parameter.metavar]  # type: ignore[attr-defined]
    return list(parameter.opts)  # type: ignore[attr-defined]


def test_public_names_of_the_package() -> None:
    import clustersim

    assert dir(clustersim) == ["RenderedResult", "Scenario", "check", "simulate"]
    assert clustersim.Scenario.__name__ == "Scenario"
    assert not hasattr(clustersim, "sinulate")
