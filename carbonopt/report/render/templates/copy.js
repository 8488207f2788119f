// Copies a text of the page, and saves a picture that a button has. Where the browser doesn't let a page copy, the text is
// selected for the reader to copy.
const NOTE_MS = 8000; // how long the page says what it did

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text.textContent);
    return "Copied.";
  } catch {
    text.closest("details").open = true;
    getSelection().selectAllChildren(text);
    return "Selected: copy it with Ctrl-C (⌘C).";
  }
}

function savePicture(name, base64) {
  const bytes = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
  const address = URL.createObjectURL(new Blob([bytes], { type: "image/svg+xml" }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), NOTE_MS); // by then the browser has read it
}

document.addEventListener("click", async function (event) {
  const { copies, saves, svg } = (event.target.closest(".extract button") || { dataset: {} }).dataset;
  if (saves) savePicture(saves, svg);
  if (!copies) return;
  const note = document.querySelector(".extract [role='status']");
  note.textContent = await copyText(document.getElementById(copies));
  setTimeout(() => (note.textContent = ""), NOTE_MS);
});
