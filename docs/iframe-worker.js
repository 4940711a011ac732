/* Search in pages that were opened from the file system, where browsers start no worker: its script runs in an iframe. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      this.ready = new Promise((resolve) => (script.onload = resolve));
      script.src = new URL(url, location.href).href;
      inner.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
