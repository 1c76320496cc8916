"""How are values interpolated between measured points, and with what error?

Values are modelled as a common level, plus a smooth function of the point, plus independent noise of each
point: a Gaussian process whose covariance of two points at distance d, in units of the smooth part's
variance, is

    LEVEL + (1 + s) exp(-s), s = sqrt(3) d / RANGE        (Matérn, smoothness 3/2),

and NOISE more for a point itself.

The prediction at a point is then a weighted mean of the values of its NEIGHBOURS. The error is the
leave-one-out error.

Chosen by that error, among methods that return zero where all values are zero. On the 920 published matmuls
of four GPUs (`clustersim/validation/published/kernels.csv`), mean absolute errors in percent for the
published rooflines of B200, A100 PCIe, A100 SXM and H100, and as a fraction of the roofline's own error,
then the fraction for rooflines of a peak and a bandwidth only, and the fraction for matmuls, norms and
attention measured on a CPU (60 and 300 of each):

    roofline by itself                             11.6  4.0  6.9  7.0   1.00   1.00   1.00
    inverse distance, 16 neighbours                 8.1  3.5  5.7  6.3   0.82   0.43   0.80
    linear regression, 24 neighbours, ridge 0.3     7.9  3.5  6.0  6.4   0.83   0.41   0.78
    kriging, 16 neighbours (this)                   7.9  3.3  5.8  6.3   0.81   0.41   0.77
    kriging, all points                             8.2  3.4  5.9  6.4   0.83   0.41   0.76

Half or twice the RANGE, a third or three times the NOISE and a tenth or ten times the LEVEL give 0.81 to
0.84 in the first of the fractions: the constants matter little.

References: Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006, equations 2.25 and 4.17;
Cressie, "Statistics for Spatial Data", 1993, section 3.2 (ordinary kriging).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray

RANGE: Final = 2.0
NOISE: Final = 0.3
LEVEL: Final = 10.0
NEIGHBOURS: Final = 16
_BATCH_SIZE: Final = 256  # points predicted at once, which bounds memory


@dataclass(frozen=True, slots=True)
class Kriging:
    """Local ordinary kriging. points: [points, dimensions]; values: [points]."""

    points: FloatArray
    values: FloatArray

    def predict(self, point: FloatArray) -> float:
        """Predicted value at a point [dimensions]."""
        return float(self._predict_batch(_squared_distances(point[None], self.points))[0])

    def leave_one_out(self) -> FloatArray:
        """Leave-one-out prediction at every point: [points]; zero where there is no other point."""
        if len(self.points) < 2:
            return np.zeros(len(self.points))
        batches = []
        for start in range(0, len(self.points), _BATCH_SIZE):
            batch = self.points[start : start + _BATCH_SIZE]
            squared = _squared_distances(batch, self.points)
            index = np.arange(len(batch))
            squared[index, start + index] = np.inf
            batches.append(self._predict_batch(squared))
        return np.concatenate(batches)

    def _predict_batch(self, squared_distances: FloatArray) -> FloatArray:
        """Predictions from squared distances to the points: [targets, points]; infinite distances exclude a point."""
        usable = int(np.isfinite(squared_distances[0]).sum())
        count = min(NEIGHBOURS, usable)
        neighbours = np.argpartition(squared_distances, count - 1, axis=1)[:, :count]
        neighbour_points = self.points[neighbours]
        covariance = _matern_covariance(_squared_distances(neighbour_points, neighbour_points)) + NOISE * np.eye(count)
        target_covariance = _matern_covariance(np.take_along_axis(squared_distances, neighbours, axis=1))
        weights = np.linalg.solve(covariance, target_covariance[..., None])[..., 0]
        expected: FloatArray = (weights * self.values[neighbours]).sum(axis=1)
        return expected


def smooth_correlation(distance: float) -> float:
    """Correlation of the smooth part at two points at a distance, 1 at none."""
    return float(_matern_covariance(np.array(distance**2))) - LEVEL


def _squared_distances(first: FloatArray, second: FloatArray) -> FloatArray:
    """Squared distances: [.., first, second] of [.., first, dimensions] and [.., second, dimensions]."""
    dot_products = first @ np.swapaxes(second, -1, -2)
    lengths = (first**2).sum(axis=-1)[..., :, None] + (second**2).sum(axis=-1)[..., None, :]
    return np.asarray(np.maximum(lengths - 2.0 * dot_products, 0.0), dtype=np.float64)


def _matern_covariance(squared_distances: FloatArray) -> FloatArray:
    """Matérn covariance at squared distances."""
    scaled = np.sqrt(3.0 * squared_distances) / RANGE
    covariance: FloatArray = LEVEL + (1.0 + scaled) * np.exp(-scaled)
    return covariance
