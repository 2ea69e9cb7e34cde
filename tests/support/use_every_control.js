// Clicks every button, opens every fold and changes every input of the page; gives the number of different controls.
(async () => {
  const pause = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  const key = (each) => [each.tagName, each.id, each.className, each.closest("[data-metric]")?.dataset.metric,
    each.textContent.slice(0, 40), each.ariaLabel].join("|");
  const told = (each, name) => each.dispatchEvent(new Event(name, { bubbles: true }));
  const used = new Set();
  for (let round = 0; round < 4; round++) { // what one control opens holds further ones
    for (const each of document.querySelectorAll("button, summary, select, input, .row, .token, canvas, .links a")) {
      if (!each.isConnected || !each.getClientRects().length || (round && used.has(key(each)))) continue;
      used.add(key(each));
      if (each.tagName === "SELECT") {
        for (const option of [...each.options, each.options[0]]) {
          each.value = option.value;
          told(each, "change");
          await pause();
        }
      } else if (each.type === "checkbox") {
        each.click();
        await pause();
        each.click();
      } else if (each.tagName === "INPUT") {
        for (const value of ["3", each.defaultValue]) {
          each.value = value;
          told(each, "input");
          await pause();
        }
      } else if (each.tagName === "CANVAS") {
        const box = each.getBoundingClientRect();
        const at = { clientX: box.left + box.width / 2, clientY: box.top + 9, bubbles: true };
        for (const name of ["pointermove", "mousemove", "pointerleave"]) each.dispatchEvent(new PointerEvent(name, at));
      } else {
        each.click();
        if (each.tagName === "SUMMARY" && !each.parentElement.open) each.click();
      }
      await pause();
    }
  }
  return used.size;
})();
