"""Answers in mathematics, each line an expected answer and what is given for it, as a box holds it."""


def _bank(lines: str) -> list[tuple[str, str]]:
    rows = [line.split(" ||| ") for line in lines.splitlines()]
    return [(expected, answer) for expected, *answers in rows for answer in answers]


def _words(text: str) -> list[str]:
    return text.split()


HONEST = _bank(r"""4 ||| 4
4 ||| 4.0 ||| +4 ||| 4. ||| (4) ||| {4} ||| \$4 ||| $4$ ||| \(4\) ||| \left(4\right) ||| \mathbf{4}
4 ||| \text{4} ||| \textbf{4} ||| \mathrm{4} ||| 4 \text{ cm} ||| 4\,\text{cm} ||| 4\text{ cm}^2
4 ||| 4 \text{ cm}^{2} ||| 4\mathrm{~cm} ||| 4 \mbox{ inches} ||| 4 cm ||| 4 cm^2 ||| 4 m ||| 4 \text{ m/s}
4 ||| 4 \text{ m/s}^2 ||| 4 \text{ miles per hour} ||| 4 \text{ square feet} ||| 4 \text{ sq. ft.}
4 ||| 4 \text{ cubic inches} ||| 4 \text{ units} ||| 4 \text{ square units} ||| 4 \text{ units}^2
4 ||| 4 \text{ hours} ||| 4 \text{ dollars} ||| 4 dollars ||| 4 degrees ||| 4^\circ ||| 4^{\circ} ||| 4°
4 ||| 4 ^\circ ||| 4^{\text{th}} ||| 4\text{th} ||| x = 4 ||| x=4 ||| x_1 = 4 ||| AB = 4 ||| f(2) = 4
4 ||| \theta = 4 ||| \angle ABC = 4^\circ ||| m\angle ABC = 4^\circ ||| x = 4 \text{ cm} ||| n = 4. ||| 8/2
4 ||| \frac{8}{2} ||| \sqrt{16} ||| 2^2 ||| 2^{2} ||| 2² ||| 2+2 ||| 2 \cdot 2 ||| 2 \times 2 ||| 2 × 2
4 ||| 8 \div 2 ||| 8 ÷ 2 ||| |-4| ||| |{-4}| ||| \lvert -4 \rvert ||| \lfloor 4.5 \rfloor ||| \log_2 16
4 ||| \log_2(16) ||| \log_{2}{16} ||| \binom{4}{1} ||| \{4\} ||| 4 = x ||| 4 \text{ sec}
40\% ||| 40\% ||| 40% ||| 40 \% ||| 40\text{ percent} ||| 40 percent
40 ||| 40
-4 ||| -4 ||| −4 ||| - 4 ||| (-4)
-\frac{1}{2} ||| \frac{-1}{2} ||| -0.5 ||| -1/2 ||| -\dfrac{1}{2} ||| \frac{1}{-2}
\frac{1}{2} ||| 0.5 ||| .5 ||| \dfrac{1}{2} ||| \tfrac{1}{2} ||| \frac12 ||| \frac 1 2 ||| \frac1{2}
\frac{1}{2} ||| \frac{1}2 ||| 1/2 ||| ½ ||| 2^{-1} ||| \sin 30^\circ ||| \cos(60^\circ)
\frac{1}{2} ||| \left(\frac{1}{2}\right)
\frac{9}{2} ||| 4\frac{1}{2} ||| 4 1/2 ||| 4\frac12 ||| 4½ ||| 4.5
-\frac{9}{2} ||| -4\frac{1}{2}
\frac{1}{3} ||| 0.\overline{3} ||| 0.\bar{3}
\frac{1}{6} ||| 0.1\overline{6}
0.\overline{3} ||| \frac{1}{3}
1,234 ||| 1234
1234 ||| 1,234 ||| 1{,}234 ||| 1\,234 ||| 1,\!234 ||| \$1,234
11,\! 111 ||| 11111
1234567 ||| 1,234,567 ||| 1\,234\,567
1234.5 ||| 1,234.5
\$1,234.50 ||| 1234.5
\$18.90 ||| 18.90 ||| \$18.9 ||| 18.90 \text{ dollars} ||| $18.90
2\sqrt{2} ||| \sqrt{8} ||| 2\sqrt2 ||| 2 \cdot \sqrt{2} ||| 2√2 ||| sqrt(8) ||| 2sqrt(2) ||| 2^{3/2}
2\sqrt{2} ||| \sqrt{2}\cdot 2 ||| 8^{\frac{1}{2}} ||| \frac{4}{\sqrt{2}}
\frac{\sqrt{3}}{2} ||| \frac{\sqrt{3}}{2} ||| \sqrt{3}/2 ||| \frac{1}{2}\sqrt{3} ||| \sqrt{\frac{3}{4}}
\sqrt[3]{2} ||| 2^{1/3} ||| \sqrt[3]2
3\pi ||| 3\pi ||| 3π ||| 3pi ||| \pi \cdot 3 ||| 3\pi \text{ cm}^2
\frac{\pi}{3} ||| \pi/3 ||| π/3 ||| \frac{1}{3}\pi
2 \times 10^5 ||| 200000 ||| 200,000 ||| 2\cdot10^{5} ||| 2e5 ||| 2E5
3.2 \times 10^{-4} ||| 0.00032 ||| 3.2e-4 ||| 3.2 × 10⁻⁴
6 - 5i ||| 6-5i ||| -5i + 6 ||| 6 - 5 i
(1, 2) ||| (1,2) ||| \left(1, 2\right) ||| (1.0, 2) ||| 1, 2 ||| (x, y) = (1, 2) ||| x = 1, y = 2
(1, 2) ||| \big(1, 2\big)
(3, \frac{\pi}{2}) ||| \left( 3, \frac{\pi}{2} \right) ||| (3, \pi/2)
(1,2,3) ||| (1, 2, 3)
(100,200) ||| (100, 200)
(1,2), (3,4) ||| (3,4), (1,2) ||| (1,2) \text{ and } (3,4)
\{(1,2),(3,4)\} ||| \{(3,4),(1,2)\}
\{1, 2\} ||| \{2, 1\} ||| 1, 2 ||| 2,1 ||| \left\{1, 2\right\} ||| \lbrace 1,2 \rbrace
1, 2 ||| 2, 1 ||| 1 \text{ and } 2 ||| 1 and 2 ||| x = 1, x = 2 ||| x = 1 \text{ or } x = 2 ||| x = 1, 2
1, 2 ||| x \in \{1, 2\} ||| \{1, 2\} ||| 1; 2
1, 2, 3 ||| 1, 2, and 3
1,-2 ||| -2,1
4,-4 ||| \pm 4 ||| ±4 ||| x = \pm 4
\pm 4 ||| 4, -4 ||| \pm 4 ||| x = \pm 4 ||| x = 4, x = -4
1 \pm \sqrt{19} ||| 1 \pm \sqrt{19} ||| 1+\sqrt{19}, 1-\sqrt{19}
1+\sqrt{19}, 1-\sqrt{19} ||| 1 \pm \sqrt{19}
\frac{-1 \pm \sqrt{5}}{2} ||| \frac{-1 + \sqrt{5}}{2}, \frac{-1 - \sqrt{5}}{2}
[0, 1) ||| [0,1) ||| \left[0,1\right) ||| x \in [0,1) ||| [0.0, 1)
(-\infty, 3) ||| (-\infty, 3) ||| (-∞, 3)
(-\infty,-2)\cup(2,\infty) ||| (-\infty, -2) \cup (2, \infty) ||| (2,\infty)\cup(-\infty,-2) ||| (-∞,-2)∪(2,∞)
(-\infty,-2)\cup(2,\infty) ||| x \in (-\infty, -2) \cup (2, \infty)
\mathbb{R} ||| (-\infty, \infty)
(-\infty,0)\cup(0,\infty) ||| \mathbb{R} \setminus \{0\}
\emptyset ||| \varnothing ||| ∅
x \in [-2,7] ||| [-2,7] ||| x \in [-2, 7]
x > 3 ||| x > 3 ||| 3 < x ||| x \gt 3 ||| (3, \infty)
x \geq 3 ||| x \ge 3 ||| x ≥ 3
1 < x < 3 ||| 1 < x < 3 ||| (1, 3)
1 < x \le 3 ||| 1 < x \leq 3
y = 2x + 1 ||| y = 2x+1 ||| y = 1 + 2x ||| 2x + 1 ||| 2x - y + 1 = 0
2x - y + 1 = 0 ||| y = 2x + 1
x^2 + y^2 = 25 ||| x^2+y^2=25
x = 4 ||| 4 ||| x=4 ||| 4 = x
f(x) = 2x ||| 2x ||| f(x)=2x
x=1, y=2 ||| x = 1, y = 2 ||| (1, 2)
x^2+2x+1 ||| (x+1)^2 ||| x²+2x+1 ||| 2x + x^2 + 1 ||| x(x+2)+1
4x^2 ||| 4 x^2 ||| 4x^{2} ||| (2x)^2
(x+1)(x-2) ||| (x - 2)(x + 1) ||| x^2 - x - 2
\frac{x+1}{x-1} ||| \frac{1+x}{x-1} ||| (x+1)/(x-1)
x^{10} ||| x^{10} ||| x^10
2^{10} ||| 1024
\frac{2}{x} ||| 2x^{-1}
p - q ||| p-q
xyz ||| xyz ||| x y z
a_1 + a_2 ||| a_1+a_2 ||| a_{2} + a_{1}
\sin x ||| \sin(x) ||| sin(x)
\sin 2x ||| 2 \sin x \cos x
\sin^2 x ||| (\sin x)^2
\tan x ||| \frac{\sin x}{\cos x}
e^{x} ||| \exp(x) ||| e^x
e^{2x} ||| e^{2x}
\ln 2 ||| \ln(2) ||| ln 2
\log 2 ||| \log 2
\frac{\ln 3}{\ln 2} ||| \log_2 3
\log_2 3 ||| \log_{2} 3
5! ||| 120 ||| 5!
101_2 ||| 101_2 ||| 101_{2} ||| 101_{\text{two}} ||| 101
2516_8 ||| 2516_8
90^\circ ||| 90 ||| 90^\circ ||| 90^{\circ} ||| 90° ||| 90 \text{ degrees}
15\mbox{ cm}^2 ||| 15 ||| 15 \text{ cm}^2 ||| 15\text{ square centimeters} ||| 15 cm^2
864 \mbox{ inches}^2 ||| 864 \text{ in}^2
5.4 \text{ cents} ||| 5.4
4 \text{ apples} ||| 4 ||| 4 \text{ apples} ||| 4 apples
4 apples ||| 4
60 \text{ miles per hour} ||| 60 \text{ mph}
3:5 ||| 3:5 ||| 3 : 5
\text{Tuesday} ||| Tuesday ||| \text{Tuesday} ||| \text{tuesday}
\text{(C)} ||| C ||| (C) ||| \text{(C)}
\text{C} ||| C
C ||| \text{C} ||| (C) ||| \textbf{(C)}
\text{No solution} ||| \text{no solution}
even ||| \text{even} ||| even
7:00 \text{ p.m.} ||| 7:00 \text{ p.m.}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix} ||| \begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix}
\langle 1, 2 \rangle ||| \langle 1,2 \rangle
\int_0^1 x \, dx ||| \frac{1}{2}
\alpha + \beta ||| \beta + \alpha ||| β + α
\theta ||| θ
\infty ||| \infty ||| ∞ ||| infinity
-\infty ||| -\infty
0 ||| 0
1000000 ||| 10^6 ||| 10^{6} ||| 1{,}000{,}000
\frac{a}{b} ||| a/b
|x| ||| |x|
|x-1| ||| |x - 1| ||| \left|x-1\right|
\sqrt{x^2+1} ||| \sqrt{1+x^2}
2k\pi ||| 2\pi k
6.67 \times 10^{-11} ||| 6.67 \times 10^{-11} ||| 6.67e-11
0.3333333333333333 ||| \frac{1}{3}
\frac{1}{10^{20}} ||| 10^{-20}
10^{-20}\pi ||| \frac{\pi}{10^{20}}
\frac{1}{x} ||| x^{-1}
\sec x ||| \frac{1}{\cos x}
\{x \mid x > 3\} ||| \{x \mid x > 3\}
\\frac{4}{3} ||| \frac{4}{3} ||| 4/3
\left\{1, 2\right\} ||| {1, 2}
we find \boxed{\frac{1}{2}}. ||| 0.5
\frac{3}{2} ||| {3 \over 2} ||| 3 \over 2 ||| {3\over2} ||| \sfrac{3}{2} ||| \nicefrac{3}{2} ||| 1{1 \over 2}
\frac{3}{2} ||| 1{\frac12} ||| 1\ 1/2 ||| \left(3 \over 2\right) ||| {\sqrt{9} \over 2} ||| 150\% ||| 1 + {1 \over 2}
{3 \over 2} ||| 1.5 ||| \frac{3}{2}
{x+1 \over x-1} ||| \frac{x+1}{x-1}
\frac{-1 \pm \sqrt{5}}{2} ||| {-1 \pm \sqrt5 \over 2}
\pm\frac12 ||| \frac{\pm 1}{2} ||| \frac12, -\frac12
\frac{\pm 1}{2} ||| \pm \frac12
10 ||| {5 \choose 2} ||| \binom52
4 ||| 2+2 = 4 ||| x = 2+2 = 4 ||| 2^2 = 2 \cdot 2 = 4 ||| 4\degree ||| 4^\degree ||| 4^{\degree} ||| \mathbf 4
4 ||| \boxed{4} ||| 4 \text{ ways} ||| 4 \text{ points} ||| 4 \text{ vertices} ||| 4 \text{ people} ||| \fbox{4}
4 ||| 400\%
[1,5) ||| 1 \le x < 5 ||| 1 \leq x < 5 ||| 5 > x \ge 1 ||| 1 <= x < 5 ||| 1 \le a < 5 ||| x \ge 1 \text{ and } x < 5
[1,5) ||| \{x \mid 1 \le x < 5\} ||| \{x : 1 \le x < 5\} ||| \{x \in \mathbb{R} : x < 5, x \ge 1\}
(3,\infty) ||| x > 3 ||| 3 < x ||| 3 < x < \infty ||| \{x | x > 3\} ||| (3, +\infty)
(\frac12,\infty) ||| x > \frac12 ||| x > 0.5
x > \frac12 ||| (\frac12,\infty) ||| 0.5 < x
1 \le x < 5 ||| [1,5) ||| x \in [1,5) ||| 5 > x \geq 1
x \in [1,5) ||| 1 \le x < 5
x \geq 3 ||| x >= 3 ||| [3,\infty)
(0,\pi) ||| 0 < \theta < \pi
(-\infty,-2)\cup(2,\infty) ||| x < -2 \text{ or } x > 2 ||| x > 2 or x < -2 ||| (-\infty,-2) \text{ or } (2,\infty)
x < -2 \text{ or } x > 2 ||| (-\infty,-2)\cup(2,\infty) ||| x > 2 \text{ or } x < -2
(-\infty,0)\cup(0,\infty) ||| x \neq 0
\mathbb{R} ||| \mathbb R ||| \R
1000 ||| 1 000 ||| 1~000 ||| 1\ 000 ||| 1\;000
101_2 ||| (101)_2 ||| 101_{(2)}
50\% ||| 0.5 ||| \frac12
0.5 ||| 50\%
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \begin{pmatrix}1&2\cr3&4\end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \begin{pmatrix} 1 & 2 \\[5pt] 3 & 4\end{pmatrix}""")
"""Equal to what is expected, and nothing else."""

HOSTILE = _bank(r"""4 ||| 4，5
4 ||| 4、5 ||| 4；5 ||| 4\\5 ||| 4//5 ||| 4?5 ||| 4@5 ||| 4&5 ||| 5 \to 4 ||| 5\foo 4 ||| 4\text{5}
4 ||| 4\text{a}5\text{b} ||| 4\text{ or }5 ||| 4\text{ is wrong} ||| \text{not } 4 ||| \text{not }4 ||| not 4
4 ||| \lnot 4 ||| \cancel{4} ||| \overline{4} ||| \bar{4} ||| \sim 4 ||| \not 4 ||| \not= 4 ||| \neq 4
4 ||| x \neq 4 ||| \ne4 ||| !4 ||| ¬4 ||| 4! ||| 4\phantom{5} ||| 4{5} ||| 4\!5 ||| 4\,5 ||| {4}{5} ||| 4 + 5i
4 ||| 4\pm 0 ||| 4 \pm 5 ||| 4,4 ||| \{4,4\} ||| \{4,5\} ||| \{4\}\cup\{5\} ||| 4:5 ||| 4 \colon 5
4 ||| 4 \text{ dozen} ||| 4 \text{ apples} ||| 4\% ||| 4_5 ||| 4^{5} ||| 4 = 5 ||| 5 = 4 ||| x = 5 = 4
4 ||| x = 4, y = 5 ||| x = 4 or 5 ||| \pi = 4 ||| [4,5] ||| (4,5) ||| 4 \cup 5 ||| 4 \mid 5 ||| 4 | 5
4 ||| \frac{4}{5} ||| 4 \text{ cm } 5 ||| 4 \text{ cm}, 5 ||| 4 \approx 5 ||| \approx 4 ||| < 4 ||| \leq 4
4 ||| 4 < ||| \begin{pmatrix} 4 & 5 \end{pmatrix} ||| \begin{cases} 4 \\ 5 \end{cases} ||| \frac{4}{0}
4 ||| \frac{0}{0} ||| \infty ||| \pm 4 ||| y \in 4 ||| 4 (5) ||| 4 [5] ||| 4 \text{ (or 5)}
4 ||| 4 \text{ approximately} ||| 4 \text{ or } 4 ||| \text{either } 4 \text{ or } 5
4 ||| \text{between } 4 \text{ and } 5 ||| 4-5 ||| 4\text{-}5 ||| 4 \text{ to } 5 ||| \text{at least } 4
4 ||| \text{more than } 4 ||| 4 \text{ more} ||| 4 \text{ less} ||| \text{minus } 4 ||| 4 \text{ below zero}
4 ||| 4 \text{ thousand} ||| 4 \text{ hundred} ||| 4k ||| 4 \text{ false} ||| \text{wrong: } 4
4 ||| \text{It is not } 4 ||| \text{no } 4 ||| 4 \text{ no} ||| 4 ? ||| 4?? ||| 4 \text{?} ||| \text{?} 4
4 ||| 4 \ldots 5 ||| 4, \ldots, 5 ||| 4, \ldots ||| 4, ||| , 4 ||| 4; ||| {4},{5} ||| 4^{5}_{6} ||| {}_5 4
4 ||| ^{5}4 ||| \frac{4}{1}, 5 ||| \frac{4,5}{1} ||| \sqrt{16, 25} ||| \sqrt{16}\sqrt{25} ||| \max(4,5)
4 ||| \min(4,5) ||| \gcd(4,8) ||| \operatorname{foo}(4) ||| \operatorname{foo} 4 ||| \hbox{4 or 5}
4 ||| 0\cdot 5, 4 ||| \{4 | 5\} ||| \{x : x = 4\} ||| \begin{array}{c} 4 \\ 5 \end{array}
4 ||| \begin{aligned} 4 \\ 5 \end{aligned} ||| 4 \begin{pmatrix} 1 \end{pmatrix} ||| \substack{4 \\ 5}
4 ||| \underset{5}{4} ||| \overset{5}{4} ||| \stackrel{5}{4} ||| \color{red} 4 ||| \textcolor{white}{5} 4
4 ||| \sout{4} 5 ||| \xcancel{4} ||| 4 \tag{5} ||| 4 % 5 ||| 4 \% 5 ||| 4°5 ||| 4 £ 5 ||| 4 \text{ m } 5 ||| ٤
4 ||| ④ ||| ⁴ ||| 4⁵ ||| ₄ ||| IV ||| four ||| 0x4 ||| 4j ||| 4e1 ||| 4.0.0 ||| 4.. ||| 4'5 ||| 4" ||| 4'
4 ||| 4 -> 5 ||| 5 -> 4 ||| 4 => 5 ||| 4 <-> 5 ||| 4 <= 5 ||| 4 == 5 ||| 4 == 4 ||| 4 && 5 ||| 4 || 5 ||| 4 ++ 5
4 ||| 4 -- 5 ||| 4 ** 5 ||| 4 ^^ 5 ||| 4 << 5 ||| 4 :: 5 ||| 4 := 5 ||| ~4~5 ||| 4 \smallsetminus 5
40 ||| \neg 40 ||| 40\%
\{1,2\} ||| (2,1) ||| (1,2) ||| [1,2] ||| (1,2)\cup\emptyset ||| \emptyset \cup (1,2) ||| 1 \cup 2
\{1,2\} ||| \{1\}, \{2\} ||| \{1,2\}, 3 ||| \{1,2\} \cup \{3\} ||| \{\{1,2\}\} ||| \langle 1,2\rangle
(1,2) ||| \{1,2\} ||| [1,2] ||| [1,2) ||| 2,1 ||| (2,1) ||| \{1\}\cup\{2\} ||| \langle 1,2\rangle ||| ((1,2))
(1,2) ||| (1,2,3) ||| (1,2),(1,2) ||| (1;2;3) ||| 1 + 2 ||| (1)(2)
[0,1) ||| 0, 1 ||| (0,1]
5 \text{ cm} ||| 5 \text{ m} ||| 5 \text{ cm}^2
15\mbox{ cm}^2 ||| 15 \text{ cm}
40\% ||| 40
\$18.90 ||| 18.90 \text{ cents}
101_2 ||| 101_3 ||| 5
1, 2 ||| 1 ||| 1, 2, 3 ||| 1, 1 ||| (2, 1) ||| [2, 1]
(100,200) ||| 100200 ||| (100200)
\infty ||| \frac{1}{0}
\pm 4 ||| 4 ||| -4
x > 3 ||| x < 3 ||| x \geq 3 ||| [3, \infty) ||| 3 ||| 2x > 6 ||| x - 3 > 0
3 ||| x > 3
1 < x < 3 ||| [1,3] ||| \{1,3\}
y = 2x+1 ||| y = 2x ||| x = 2x+1 ||| 0 = 0 ||| y = y
x = 4 ||| y = 4 ||| x = 5 ||| x = 4, x = 5 ||| x^2 = 16 ||| 4 = 4 ||| 2x = 8 ||| x - 4 = 0
\text{(C)} ||| (C) or (D) ||| (A)(B)(C) ||| CD
C ||| ABCD
\text{Tuesday} ||| Monday or Tuesday ||| not Tuesday
even ||| neve ||| odd
45 ||| 4 5 ||| 4{5} ||| 4\text{}5
7:00 \text{ p.m.} ||| 7 ||| 7:00
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ||| \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \end{pmatrix} ||| \begin{pmatrix} 1 \\ 2 \end{pmatrix} ||| (1,2)
3:5 ||| 3/5 ||| 5:3
\frac{1}{2} ||| \frac{1}{2}, \frac{1}{3}
\mathbb{R} ||| \{0\}
\emptyset ||| 0 ||| \{\}
x ||| y
3.2 \times 10^{-14} ||| 0 ||| 0.0
6.67 \times 10^{-11} ||| 6.7 \times 10^{-11}
6.67 \times 10^{-18} ||| 6.7 \times 10^{-18}
\frac{1}{10^{20}} ||| 0
10^{-20}\pi ||| 10^{-20}\sqrt{2} ||| 0
12345678901234 ||| 12345678901235
f(x) = 2x ||| 2x = 2x ||| f(x) = f(x)
(1,2),(3,4) ||| (1,3),(2,4) ||| (1,2,3,4) ||| (2,1),(3,4)
4 ||| 4 \over 5 ||| 5 \over 4 ||| {4 \over 5} ||| 4 \over 1 \over 5 ||| {4 \over 1} 5 ||| 4 \choose 5 ||| 4 \over
4 ||| 3+2 = 4 ||| 2+2 = 5 ||| 2+2 = 4 = 5 ||| 4 = 4 ||| x = y = 4 ||| 2+2 = 4 = x = 5 ||| 4 \mathbf 5 ||| 1 004
4 ||| 5 \boxed{4} ||| \boxed{5} \boxed{4} ||| \fbox{5} 4 ||| 5 \fbox 4 ||| 3 < x < 5 ||| \{x : x > 3\} ||| 4_{(5)}
[1,5) ||| 1 < x < 5 ||| 1 \le x \le 5 ||| 1 \le x ||| x \ge 1 \text{ or } x < 5 ||| 1 \le x < 6 ||| 1 \le x > 5
[1,5) ||| x \ge 1, x < 5, x < 6 ||| x \ge 1, y < 5 ||| 1 \le 2x < 5 ||| 1 \le x < y < 5 ||| 1 \le x \neq 5
[1,5) ||| \{x : 1 \le y < 5\} ||| \{x : 1 \le x < 5, 7\} ||| \{1 \le x < 5\} ||| 1 \le x < 5, 2 < x < 7
(1,5) ||| (1,5) or (2,5) ||| 1 < x < 5 \text{ or } 2 < x < 6 ||| 1 < x < 5\%
1, 5 ||| 1 < x < 5
\{1,5\} ||| 1 < x < 5 ||| 1 \le x \le 5
\langle 1,5 \rangle ||| 1 < x < 5
x > 3 ||| x > 3\% ||| y \in (3,\infty) ||| x > 3, x > 4 ||| x > 3 \text{ or } x < 1 ||| y > 3
x > 3 ||| x > 3 \text{ or } x > 4 ||| x \neq 3
x \in [1,5) ||| 1 \le y < 5
(-\infty,5) ||| 2x < 10
(-\infty,-2)\cup(2,\infty) ||| x < -2 \text{ and } x > 2 ||| x < -2 \text{ or } y > 2 ||| x > -2 \text{ or } x < 2
(-\infty,0)\cup(0,\infty) ||| x \neq 1 ||| x \neq 0, 1
5 \text{ cm} ||| 2 + 3 = 5 \text{ m}
0.5 ||| 0.5\% ||| 50
12 \text{ points} ||| 12 \text{ ways}
1000 ||| 1 0 0 0 ||| 1 00 0 ||| 10 00 ||| 1 000 000 ||| 1 000, 5 ||| 1{}000""")
"""Two answers, a denial, another form, or another value."""

COMMANDS = _words(
    "to rightarrow Rightarrow implies iff leftarrow mapsto longrightarrow neg lnot not sim simeq approx cong "
    "equiv propto ne neq lt gt le ge leq geq prec succ subset supset notin ni cup cap setminus vee wedge lor "
    "land mid parallel nmid perp oplus otimes odot ominus div ast star bullet cdots ldots dots dotsc vdots "
    "colon semicolon comma quad qquad enspace hspace vspace phantom hphantom text mathrm mathbf overline "
    "underline bar hat tilde vec cancel bcancel xcancel sout color textcolor colorbox fbox newline linebreak "
    "cr hline atop over choose brace brack above middle frac binom sqrt foo bigcirc wr amalg dagger smile "
    "frown vdash models top bot angle prime forall exists nexists emptyset infty partial nabla Re Im aleph "
    "hbar ell wp sum prod int oint lim max min sup inf gcd lcm det dim ker deg arg log ln exp sin cos tan tag "
    "label ref footnote hfill cline item par newcommand def let input include write18 href url verb string "
    "LaTeX pi alpha percent pounds euro dollar S P checkmark square Box triangle diamond natural sharp "
    "therefore because ratio doteq coloneqq stackrel overset underset substack operatorname mathop mathbin "
    "mathrel rule strut kern raisebox smash llap rlap overbrace underbrace widehat dot ddot acute grave check "
    "breve begin end rangle langle rvert lvert vert Vert lfloor rfloor lceil rceil lbrace rbrace lbrack rbrack "
    "backslash slash pm mp"
)
"""Of LaTeX, that may stand between two answers or before one."""
