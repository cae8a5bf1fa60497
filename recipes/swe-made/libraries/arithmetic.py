"""Libraries that compute: polynomials, matrices, statistics."""

from random import Random

from repository import Library


def _numbers(r: Random, low: int = -9, high: int = 9, most: int = 7, least: int = 1) -> list[int]:
    return [r.randint(low, high) for _ in range(r.randint(least, most))]


def _matrix(r: Random, rows: int, columns: int) -> list[list[int]]:
    return [[r.randint(-4, 6) for _ in range(columns)] for _ in range(rows)]


def _square(r: Random) -> list[list[int]]:
    size = r.randint(1, 3)
    return _matrix(r, size, size)


POLYNOMIAL = Library(
    name="polynomial",
    about="<<Polynomials with whole coefficients, as lists from the constant up|Arithmetic on lists of coefficients>>",
    names="""
        polys: polynomials coefficient_lists; basics: core_ops foundation; calculus: analysis_mod slopes
        trimmed: stripped without_zeros; degree: order_of highest_power; add: plus sum_of; multiply: times product_of
        evaluate_at: value_at horner; derivative: differentiate slope_of; antiderivative: primitive integrate_whole
        to_text: pretty formatted; scale: stretched multiplied_by; compose: substitute chain; coefficients: terms poly
        power: exponent grade
    """,
    files={
        "polys/basics.py": '''"""<<Sums, products and values|Basic arithmetic>>."""


def trimmed(coefficients):
    """<<Coefficients without zeros at the highest powers; [0] for none|Drop leading zeros, but keep one number>>."""
    result = list(coefficients)
    while len(result) > 1 and result[-1] == 0:
        result.pop()
    return result or [0]


def degree(coefficients):
    """<<Highest power with a coefficient that is not zero|Degree; 0 for constants>>."""
    return len(trimmed(coefficients)) - 1


def add(first, second):
    """<<Sum of two polynomials, of any two lengths|Add term by term>>."""
    length = max(len(first), len(second))
    result = []
    for power in range(length):
        a = first[power] if power < len(first) else 0
        b = second[power] if power < len(second) else 0
        result.append(a + b)
    return trimmed(result)


def scale(coefficients, factor):
    """<<Polynomial times a number|Multiply each coefficient>>."""
    return trimmed([factor * item for item in coefficients])


def multiply(first, second):
    """<<Product of two polynomials|Multiply two polynomials>>."""
    result = [0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            result[i + j] += a * b
    return trimmed(result)


def evaluate_at(coefficients, x):
    """<<Value at x|The polynomial's value, by Horner's rule>>."""
    total = 0
    for item in reversed(coefficients):
        total = total * x + item
    return total
''',
        "polys/calculus.py": '''"""<<Derivatives, composition and printing|More than arithmetic>>."""

from .basics import add, multiply, scale, trimmed


def derivative(coefficients, times=1):
    """<<Derivative, taken once or several times|Differentiate a polynomial>>."""
    result = list(coefficients)
    for _ in range(times):
        result = [power * item for power, item in enumerate(result)][1:]
    return trimmed(result)


def compose(outer, inner):
    """<<Coefficients of outer(inner(x))|Put one polynomial into the other>>."""
    total = [0]
    for item in reversed(outer):
        total = add(multiply(total, inner), [item])
    return total


def to_text(coefficients):
    """<<Text such as 3x^2 - x + 1, highest power first|Write a polynomial as people do>>."""
    parts = []
    for power, item in reversed(list(enumerate(trimmed(coefficients)))):
        if item == 0:
            continue
        number = "" if abs(item) == 1 and power > 0 else str(abs(item))
        letter = "" if power == 0 else "x" if power == 1 else f"x^{power}"
        sign = "-" if item < 0 else "+"
        parts.append((sign, number + letter))
    if not parts:
        return "0"
    head = ("-" if parts[0][0] == "-" else "") + parts[0][1]
    return " ".join([head] + [f"{sign} {body}" for sign, body in parts[1:]])
''',
    },
    calls={
        "trimmed": lambda r: [_numbers(r, -1, 1, 5, 0)],
        "degree": lambda r: [_numbers(r, -1, 2, 5)],
        "add": lambda r: [_numbers(r, -3, 3, 5), _numbers(r, -3, 3, 5)],
        "scale": lambda r: [_numbers(r), r.randint(-3, 3)],
        "multiply": lambda r: [_numbers(r, -3, 3, 4), _numbers(r, -3, 3, 4)],
        "evaluate_at": lambda r: [_numbers(r, -3, 3, 5), r.randint(-3, 3)],
        "derivative": lambda r: [_numbers(r, -3, 5, 5), r.randint(0, 3)],
        "compose": lambda r: [_numbers(r, -2, 3, 4), _numbers(r, -2, 2, 3)],
        "to_text": lambda r: [_numbers(r, -2, 2, 4)],
    },
    bugs=r"""
constant-zero: return result or [0] => return result
    The empty list is not turned into a zero.
    Nothing is given back for a polynomial without any coefficients.
keep-zeros: while len(result) > 1 and result[-1] == 0: => if len(result) > 1 and result[-1] == 0:
    Only one of several leading zeros is dropped.
    Zeros at the high end are not all removed.
degree: return len(trimmed(coefficients)) - 1 => return len(coefficients) - 1
    The degree counts powers whose coefficient is zero.
    Zeros at the end make the degree too high.
minus: result.append(a + b) => result.append(a - b)
    Sums come out as differences.
    The second summand is taken with the wrong sign.
product: result[i + j] += a * b => result[i + j] = a * b
    Products lose terms of equal power.
    Multiplying keeps only the last of the terms that belong together.
horner: for item in reversed(coefficients): => for item in coefficients:
    Values are computed as if the list began with the highest power.
    Evaluation reads the coefficients in the wrong direction.
horner-order: total = total * x + item => total = (total + item) * x
    Values have one factor x too many.
    The value at a point is a multiple of x, which it need not be.
powers: item in enumerate(result)][1:] => item in enumerate(result, 1)][1:]
    Derivatives have factors that are too large.
    Differentiating multiplies by a power that is off by one.
times: for _ in range(times): => for _ in range(min(times, 1)):
    Higher derivatives are the first one.
    Asking for a second derivative changes nothing.
one-letter: number = "" if abs(item) == 1 and power > 0 else => number = "" if abs(item) == 1 else
    A constant of one vanishes from the text.
    The printed form lacks the number one at its end.
sign: sign = "-" if item < 0 else "+" => sign = "-" if item < -1 else "+"
    A coefficient of minus one is printed with a plus.
    The sign of some terms is wrong in the printed form.
inner: total = add(multiply(total, inner), [item]) => total = multiply(add(total, [item]), inner)
    Composition gives too high a degree.
    Putting one polynomial into another multiplies once too often.
factor: [factor * item for item in coefficients] => [factor + item for item in coefficients]
    Scaling adds the number.
    A polynomial times a number is not what it should be.
""",
)

MATRIX = Library(
    name="matrix",
    about="<<Small matrices as lists of rows|Helpers for matrices that are lists of lists>>",
    names="""
        matrices: grids_of_numbers matlib; shapes: layout structure; products: algebra_ops linear
        shape_of: dimensions size_of; transpose: flipped swap_axes; identity: unit_matrix eye
        rotate: turned quarter_turn; multiply: matmul product; matrix_power: to_the_power repeated_product
        determinant: det determinant_of; trace: diagonal_sum trace_of; minor: without_cross submatrix
        spiral: in_spiral unrolled; rows: table lines_of
    """,
    files={
        "matrices/shapes.py": '''"""<<Forms of matrices|Shapes, and matrices turned around>>."""


def shape_of(rows):
    """<<Number of rows and of columns|How many rows and columns there are>>; ValueError for ragged ones."""
    width = len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows):
        raise ValueError("ragged rows")
    return [len(rows), width]


def identity(size):
    """<<Square matrix with ones on its diagonal|Unit matrix>>."""
    return [[1 if i == j else 0 for j in range(size)] for i in range(size)]


def transpose(rows):
    """<<Matrix whose rows are the columns of this one|Swap rows and columns>>."""
    height, width = shape_of(rows)
    return [[rows[i][j] for i in range(height)] for j in range(width)]


def rotate(rows, turns=1):
    """<<Matrix after quarter turns clockwise|Turn a matrix clockwise, once or more often>>."""
    result = [list(row) for row in rows]
    for _ in range(turns % 4):
        result = [list(reversed(row)) for row in transpose(result)]
    return result


def spiral(rows):
    """<<Numbers clockwise from the top left corner inwards|Read a matrix in a spiral>>."""
    result = []
    rest = [list(row) for row in rows]
    while rest:
        result.extend(rest.pop(0))
        rest = [list(row) for row in zip(*rest)][::-1]
    return result
''',
        "matrices/products.py": '''"""<<Products, powers and determinants|Linear algebra>>."""

from .shapes import identity, shape_of, transpose


def multiply(left, right):
    """<<Product of two matrices|Matrix product>>; ValueError where shapes do not fit."""
    if shape_of(left)[1] != shape_of(right)[0]:
        raise ValueError("shapes do not fit")
    columns = transpose(right)
    return [[sum(a * b for a, b in zip(row, column)) for column in columns] for row in left]


def matrix_power(rows, exponent):
    """<<Power of a square matrix; the identity for 0|Product of a matrix with itself>>."""
    result = identity(len(rows))
    for _ in range(exponent):
        result = multiply(result, rows)
    return result


def minor(rows, row, column):
    """<<Matrix without one row and one column|What is left when a row and a column are struck out>>."""
    return [[value for j, value in enumerate(line) if j != column] for i, line in enumerate(rows) if i != row]


def determinant(rows):
    """<<Determinant, by expansion along the first row|Determinant of a square matrix>>."""
    if not rows:
        return 1
    total = 0
    for column, value in enumerate(rows[0]):
        sign = -1 if column % 2 else 1
        total += sign * value * determinant(minor(rows, 0, column))
    return total


def trace(rows):
    """<<Sum of the diagonal|Trace of a square matrix>>."""
    return sum(rows[i][i] for i in range(len(rows)))
''',
    },
    calls={
        "shape_of": lambda r: [r.choice((_matrix(r, r.randint(1, 3), r.randint(1, 3)), [[1, 2], [3]], [[1], [2, 3]]))],
        "identity": lambda r: [r.randint(0, 5)],
        "transpose": lambda r: [_matrix(r, r.randint(1, 3), r.randint(1, 3))],
        "rotate": lambda r: [_matrix(r, r.randint(1, 3), r.randint(1, 3)), r.randint(0, 6)],
        "spiral": lambda r: [_matrix(r, r.randint(1, 4), r.randint(1, 4))],
        "multiply": lambda r: [_matrix(r, r.randint(1, 3), 2), _matrix(r, r.choice((2, 2, 2, 3)), r.randint(1, 3))],
        "matrix_power": lambda r: [_square(r), r.randint(0, 3)],
        "minor": lambda r: [_matrix(r, 3, 3), r.randint(0, 2), r.randint(0, 2)],
        "determinant": lambda r: [_square(r)],
        "trace": lambda r: [_square(r)],
    },
    bugs=r"""
shape: return [len(rows), width] => return [width, len(rows)]
    Height and width are mixed up.
    The shape of a matrix that is not square is the wrong way round.
identity: 1 if i == j else 0 => 1 if i >= j else 0
    The unit matrix has ones below its diagonal as well.
    Unit matrices are triangles.
transpose: [[rows[i][j] for i in => [[rows[j][i] for i in
    Swapping rows and columns fails, or does nothing.
    Matrices are not flipped at their diagonal.
clockwise: [list(reversed(row)) for row in transpose(result)] => list(reversed(transpose(result)))
    Turning goes the wrong way round.
    A quarter turn is made counterclockwise.
turns: for _ in range(turns % 4): => for _ in range(turns % 3):
    Three quarter turns do not turn at all.
    The number of turns is not respected when it is three or more.
spiral: [list(row) for row in zip(*rest)][::-1] => [list(row) for row in zip(*rest)]
    The spiral jumps after the first row.
    Reading in a spiral goes wrong at the first corner.
fit: if shape_of(left)[1] != shape_of(right)[0]: => if shape_of(left) != shape_of(right):
    Matrices that can be multiplied are refused.
    Products of matrices of different shapes raise an error even if they fit.
product: sum(a * b for a, b in => sum(a + b for a, b in
    Products are too small or too large by a lot.
    Entries of a matrix product are sums of sums.
power-start: result = identity(len(rows))\n    for => result = rows\n    for
    Powers are one too high.
    The power with exponent zero is not the identity.
minor-row: for i, line in enumerate(rows) if i != row] => for i, line in enumerate(rows) if i > row]
    Rows above the struck one are lost too.
    Striking out a row that is not the first leaves too little.
sign: sign = -1 if column % 2 else 1 => sign = 1
    Determinants are wrong from two rows on.
    All terms of a determinant have the same sign.
trace: sum(rows[i][i] for i in range(len(rows))) => sum(rows[i][-1 - i] for i in range(len(rows)))
    The trace follows the other diagonal.
    Sums of the diagonal run from the top right.
""",
)

STATISTICS = Library(
    name="statistics",
    about="<<Summaries of lists of numbers|Simple descriptive statistics>>",
    names="""
        summaries: descriptive stats_kit; middle: location centres; spread: dispersion widths
        mean: average arithmetic_mean; median: middle_value half_point; modes: most_common commonest
        weighted_mean: weighted_average mean_by_weight; variance: squared_deviation var; value_range: span_of extent
        quantile: percentile share_point; moving_average: rolling_mean smoothed; histogram: bin_counts frequencies
        ranks: positions_of places; numbers: values data; window: width_of_window frame
    """,
    files={
        "summaries/middle.py": '''"""<<Means, medians and modes|Where the middle is>>."""

DIGITS = 4


def mean(numbers):
    """<<Arithmetic mean, to four digits; None without numbers|Average, rounded>>."""
    if not numbers:
        return None
    return round(sum(numbers) / len(numbers), DIGITS)


def weighted_mean(numbers, weights):
    """<<Mean with a weight for each number, rounded|Weighted average>>; None if all weights are 0."""
    total = sum(weights)
    if total == 0:
        return None
    return round(sum(value * weight for value, weight in zip(numbers, weights)) / total, DIGITS)


def median(numbers):
    """<<Middle of the sorted numbers; the mean of two for an even count|Median>>; None without numbers."""
    if not numbers:
        return None
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return mean([ordered[half - 1], ordered[half]])


def modes(numbers):
    """<<Most frequent numbers, from small to large|All numbers that occur most often, sorted>>."""
    counts = {}
    for value in numbers:
        counts[value] = counts.get(value, 0) + 1
    most = max(counts.values(), default=0)
    return sorted(value for value, count in counts.items() if count == most)
''',
        "summaries/spread.py": '''"""<<Spread, ranks and smoothing|How numbers are spread>>."""

from .middle import DIGITS, mean


def value_range(numbers):
    """<<Largest minus smallest number; 0 without numbers|Width of the data>>."""
    return max(numbers) - min(numbers) if numbers else 0


def variance(numbers, sample=True):
    """<<Variance: of a sample, or of a whole population|Mean squared deviation>>; 0 for fewer than two numbers."""
    if len(numbers) < 2:
        return 0
    centre = sum(numbers) / len(numbers)
    squares = sum((value - centre) ** 2 for value in numbers)
    return round(squares / (len(numbers) - 1 if sample else len(numbers)), DIGITS)


def quantile(numbers, share):
    """<<Smallest number such that at least that share of all is not larger|Quantile without interpolation>>."""
    ordered = sorted(numbers)
    position = 0
    while (position + 1) < share * len(ordered):
        position += 1
    return ordered[position]


def moving_average(numbers, window):
    """<<Mean of each run of as many neighbours as the window is wide|Rolling mean over full windows>>."""
    result = []
    for start in range(len(numbers) - window + 1):
        result.append(mean(numbers[start : start + window]))
    return result


def histogram(numbers, width):
    """<<Count of numbers for each bin, by the bin's lower bound as text|Histogram with bins of a width>>."""
    result = {}
    for value in sorted(numbers):
        low = str(value // width * width)
        result[low] = result.get(low, 0) + 1
    return result


def ranks(numbers):
    """<<Place of each number, 1 for the largest; equal numbers share the better place|Competition ranking>>."""
    return [1 + sum(other > value for other in numbers) for value in numbers]
''',
    },
    calls={
        "mean": lambda r: [_numbers(r, -9, 30, 5, 0)],
        "weighted_mean": lambda r: [_numbers(r, 0, 9, 3, 3), _numbers(r, 0, 4, 3, 3)],
        "median": lambda r: [_numbers(r, 0, 20, 6, 0)],
        "modes": lambda r: [_numbers(r, 0, 4, 7, 0)],
        "value_range": lambda r: [_numbers(r, -9, 30, 5, 0)],
        "variance": lambda r: [_numbers(r, 0, 9, 5), r.choice((True, False))],
        "quantile": lambda r: [_numbers(r, 0, 30, 8), r.choice((0.0, 0.25, 0.5, 0.75, 1.0))],
        "moving_average": lambda r: [_numbers(r, 0, 20, 7), r.randint(1, 4)],
        "histogram": lambda r: [_numbers(r, -6, 20, 7), r.choice((2, 5, 10))],
        "ranks": lambda r: [_numbers(r, 0, 6, 6)],
    },
    bugs=r"""
mean-count: return round(sum(numbers) / len(numbers), DIGITS) => return round(sum(numbers) // len(numbers), DIGITS)
    Averages are always whole numbers.
    The fraction of an average is lost.
digits: DIGITS = 4 => DIGITS = 1
    Results have too few digits.
    Results are rounded to one digit, the documentation promises four.
no-weight: total = sum(weights) => total = len(weights)
    Weighted means are too large when weights are.
    Weights do not cancel out: doubling all of them changes the result.
unsorted: ordered = sorted(numbers)\n    half => ordered = list(numbers)\n    half
    The median depends on the order of the numbers.
    Shuffling the data changes its median.
even: if len(ordered) % 2 == 1:\n        return ordered[half] => if len(ordered) > 0:\n        return ordered[half]
    For an even count the median is the upper one of the two in the middle.
    Medians of two or four numbers are wrong.
half: mean([ordered[half - 1], ordered[half]]) => mean([ordered[half], ordered[-1]])
    The median of an even count is pulled towards the largest number.
    Medians of even lists are too high.
mode-order: return sorted(value for value, count in counts => return list(value for value, count in counts
    Several winners come in no particular order.
    The most frequent numbers are not sorted.
population: (len(numbers) - 1 if sample else len(numbers)) => (len(numbers) if sample else len(numbers) - 1)
    The two kinds of variance are confused.
    The variance of a sample is divided by the wrong count.
share: while (position + 1) < share * len(ordered): => while position < share * len(ordered) - 2:
    Quantiles are one place too low.
    The highest quantile is not the largest number.
window: for start in range(len(numbers) - window + 1): => for start in range(len(numbers) - window):
    The last average is missing.
    Rolling means end one step too soon.
bins: low = str(value // width * width) => low = str(int(value / width) * width)
    Negative numbers fall into the wrong bin.
    Bins below zero are shifted by one.
ties: other > value for other in numbers => other >= value for other in numbers
    Ranks start at two.
    Places are too high, more so for numbers that occur twice.
""",
)

LIBRARIES = [POLYNOMIAL, MATRIX, STATISTICS]
