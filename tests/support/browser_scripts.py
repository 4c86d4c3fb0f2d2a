"""Owns the JavaScript that reads colours, sizes and focus out of any page; run by browser.py."""

_DESCRIBE = """
const describe = (element) => element.tagName.toLowerCase() + (element.id ? '#' + element.id : '')
  + Array.from(element.classList).map((name) => '.' + name).join('');
const style = (element, part) => getComputedStyle(element, part);
"""

# Arguments: the least ratio. Behind a text lie the backgrounds of its ancestors (each colour of a gradient counts) and,
# in SVG, the filled shapes before it that hold its middle. An opacity acts as alpha of the text.
CONTRAST = (
    _DESCRIBE
    + """
const minimum = arguments[0];
const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
function parse(colour) {
  const numbers = colour.match(/^rgba?\\(([^)]*)\\)$/);
  if (numbers) {
    const [r, g, b, a] = numbers[1].split(/[\\s,/]+/).map(Number);
    return [r, g, b, a === undefined ? 1 : a];
  }
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
function luminance(colour) {
  const part = colour.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4));
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
}
function ratio(one, two) {
  const [low, high] = [luminance(one), luminance(two)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function shapesBehind(element, box) {
  const svg = element.ownerSVGElement;
  if (!svg) return [];
  const middle = new DOMPoint(box.left + box.width / 2, box.top + box.height / 2);
  return Array.from(svg.querySelectorAll('rect, circle, ellipse, path, polygon')).filter((shape) => {
    if (!(shape.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING)) return false;
    if (style(shape).fill === 'none' || shape.closest('defs, clipPath, mask')) return false;
    return shape.isPointInFill(middle.matrixTransform(shape.getScreenCTM().inverse()));
  }).map((shape) => {
    const own = style(shape), colour = parse(own.fill);
    colour[3] *= Number(own.fillOpacity) * Number(own.opacity);
    return colour;
  });
}
function backgrounds(element) {
  let layers = [];
  for (let at = element; at; at = at.parentElement) {
    const own = style(at);
    const stops = own.backgroundImage.match(/(rgba?|color|oklch|oklab|hsla?)\\([^()]*\\)/g) || [];
    layers.unshift({colour: parse(own.backgroundColor), stops: stops.map(parse)});
  }
  const dark = style(document.documentElement).colorScheme.includes('dark')
    && matchMedia('(prefers-color-scheme: dark)').matches;
  let found = [dark ? [18, 18, 18, 1] : [255, 255, 255, 1]];
  for (const {colour, stops} of layers) {
    found = found.map((below) => over(colour, below));
    if (stops.length) found = found.flatMap((below) => stops.map((stop) => over(stop, below)));
  }
  return found;
}
function opacity(element) {
  let share = 1;
  for (let at = element; at; at = at.parentElement) share *= Number(style(at).opacity);
  return share;
}
const seen = (element) => element.checkVisibility({checkVisibilityCSS: true, checkOpacity: true})
  && !element.closest(':disabled, noscript, script, style, title');
const problems = [];
function judge(text, element, box, own) {
  const inside = element instanceof SVGElement;
  const colour = parse(inside ? own.fill : own.color);
  colour[3] *= opacity(element) * (inside ? Number(own.fillOpacity) : 1);
  for (let behind of backgrounds(element)) {
    for (const shape of shapesBehind(element, box)) behind = over(shape, behind);
    const shown = over(colour, behind), found = ratio(shown, behind);
    if (found < minimum - 0.005) {
      problems.push({text: text.trim().slice(0, 60), element: describe(element), ratio: Math.round(found * 100) / 100,
        colour: shown.slice(0, 3).map(Math.round), behind: behind.slice(0, 3).map(Math.round)});
      return;
    }
  }
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement;
  if (!node.data.trim() || !seen(element)) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  const box = range.getBoundingClientRect(), frame = element.getBoundingClientRect();
  if (box.width < 1 || box.height < 1) continue;
  if (style(element).overflow === 'hidden' && (frame.width <= 1 || frame.height <= 1)) continue;
  judge(node.data, element, box, style(element));
}
for (const field of document.querySelectorAll('input:not([type=hidden]), textarea, select')) {
  if (!seen(field)) continue;
  if (field.value) judge(field.value, field, field.getBoundingClientRect(), style(field));
  else if (field.placeholder) {
    judge(field.placeholder, field, field.getBoundingClientRect(), style(field, '::placeholder'));
  }
}
return problems;
"""
)

OVERFLOWING = (
    _DESCRIBE
    + """
const page = document.documentElement;
if (page.scrollWidth <= page.clientWidth) return [];
const clips = (element) => {
  for (let at = element.parentElement; at && at !== document.body; at = at.parentElement) {
    if (style(at).overflowX !== 'visible') return true;
  }
  return false;
};
const wide = Array.from(document.body.querySelectorAll('*'))
  .filter((element) => element.getBoundingClientRect().right > page.clientWidth + 0.5 && !clips(element));
return wide.length ? wide.map(describe) : ['html'];
"""
)

UNREACHABLE = (
    _DESCRIBE
    + """
const scrolls = (element) => {
  const own = style(element), rolls = (value) => value === 'auto' || value === 'scroll';
  return (rolls(own.overflowX) && element.scrollWidth > element.clientWidth + 1)
    || (rolls(own.overflowY) && element.scrollHeight > element.clientHeight + 1);
};
const focusable = 'a[href], button, input, select, textarea, summary, [tabindex="0"]';
return Array.from(document.body.querySelectorAll('*'))
  .filter((element) => element.checkVisibility() && scrolls(element))
  .filter((element) => !element.matches(focusable) && !element.querySelector(focusable)).map(describe);
"""
)

HEADINGS = "return Array.from(document.querySelectorAll('h1, h2, h3, h4, h5, h6')).map((h) => Number(h.tagName[1]))"

FOCUSED = (
    _DESCRIBE
    + """
const element = document.activeElement;
return !element || element === document.body || element === document.documentElement ? null : describe(element);
"""
)
