"""What does a notebook show for a result? The verdict and the timeline, in a frame of their own.

The frame holds a whole document, so that neither the notebook's style nor a second result disturbs it, and it works
offline; the price is plotly.js (0.6 MB) in every displayed result.
"""

from html import escape

from clustersim.report.document import Card, document, slot
from clustersim.report.timeline import timeline_figure
from clustersim.report.timeline_arrays import drawing
from clustersim.report.verdict import verdict_card
from clustersim.report.view import PageView

_VERDICT_PIXELS = 820  # in a narrow notebook; a frame cannot ask for what its content needs


def fragment(view: PageView) -> str:
    """HTML for `_repr_html_`."""
    figure = timeline_figure(drawing(view.timeline))
    timeline = Card(f'<section class="card">{slot(figure)}</section>', (figure,))
    content = document(view.subject.title, [Card(verdict_card(view)), timeline])
    height = _VERDICT_PIXELS + figure.height
    return (
        f'<iframe srcdoc="{escape(content)}" title="{escape(view.subject.title)}" '
        f'style="width:100%;height:{height}px;border:0;resize:vertical" sandbox="allow-scripts"></iframe>'
    )
