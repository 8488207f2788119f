// Lets the search work in pages that are opened from a disk, where browsers refuse workers: a hidden frame takes the
// worker's place. Material for MkDocs (its offline plugin) needs a script of this name and would load it from another
// server.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    const ready = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
    this.frame.srcdoc = `<!doctype html><base href="${location.href}"><body><script>
      postMessage = (data) => parent.postMessage(data, "*");
      importScripts = async (...urls) => {
        for (const url of urls) {
          await new Promise((resolve, reject) => {
            const script = document.createElement("script");
            Object.assign(script, { src: url, onload: resolve, onerror: reject });
            document.body.append(script);
          });
        }
      };
    </script><script src="${new URL(url, location.href)}"></script>`;
    this.ready = ready;
    window.addEventListener("message", (event) => {
      if (event.source === this.frame.contentWindow) {
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      }
    });
    document.body.append(this.frame);
  }

  postMessage(data) {
    // The frame's own postMessage leads here.
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
