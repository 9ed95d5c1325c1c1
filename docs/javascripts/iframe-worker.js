// Search runs in a web worker, which browsers refuse to a page opened from a folder. There, a hidden
// frame takes the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const address = new URL(url, document.baseURI).href;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          script.src = new URL(source, address).href;
          script.onload = resolve;
          script.onerror = reject;
          inner.document.body.append(script);
        });
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.inner = inner;
      this.ready = load(address);
    }

    postMessage(data) {
      const { MessageEvent } = this.inner;
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
