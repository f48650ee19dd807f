// Without this script everything is visible; with it charts answer, and tasks and lengths are picked.
(() => {
  const draw = (figure) => {
    const chart = JSON.parse(figure.nextElementSibling.textContent);
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true };
    return vegaEmbed(figure, chart, options);
  };
  if (window.vegaEmbed) {
    const observer = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries)
        if (isIntersecting) { observer.unobserve(target); draw(target); }
    }, { rootMargin: "600px" });
    document.querySelectorAll("figure.chart").forEach((figure) => observer.observe(figure));
  }

  const reveal = (hash) => {
    const target = document.getElementById(decodeURIComponent(hash.slice(1)));
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    return target;
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link) reveal(link.hash);
  });
  addEventListener("hashchange", () => reveal(location.hash)?.scrollIntoView());
  reveal(location.hash)?.scrollIntoView();

  for (const table of document.querySelectorAll("table.sortable"))
    table.tHead.addEventListener("click", ({ target }) => {
      const head = target.closest("th");
      const rising = head.ariaSort !== "ascending";
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.ariaSort = rising ? "ascending" : "descending";
      const compare = (a, b) => a.dataset.value - b.dataset.value  // NaN where one has no value
        || a.textContent.localeCompare(b.textContent, "en", { numeric: true });
      const rows = [...table.tBodies[0].rows].sort((a, b) =>
        compare(a.cells[head.cellIndex], b.cells[head.cellIndex]) * (rising ? 1 : -1));
      table.tBodies[0].append(...rows);
    });

  const bar = document.querySelector(".filter");
  if (!bar) return;
  const apply = () => {
    const choices = [...bar.querySelectorAll("select")].filter((select) => select.value);
    for (const part of document.querySelectorAll("[data-task], [data-length]"))
      part.hidden = choices.some(({ name, value }) => (part.dataset[name] ?? value) !== value);
  };
  bar.addEventListener("change", apply);
  bar.hidden = false;
  apply();
})();
