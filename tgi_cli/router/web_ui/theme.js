// Sets the chosen theme before the first paint; the default is the system's.
(() => {
  try {
    const theme = localStorage.getItem("tgi.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be disabled: the system's theme remains.
  }
})();
