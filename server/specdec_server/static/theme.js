// Runs before the first paint, so that a chosen colour scheme does not flash.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("specdec-tap-theme"); } catch { /* storage is off: as the system */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
