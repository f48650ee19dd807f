// Without this script everything is visible; with it tasks and lengths can be picked.
(() => {
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
