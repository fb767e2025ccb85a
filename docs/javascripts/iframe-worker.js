// Search from disk. Browsers refuse workers on file:, so there the theme's search worker runs in a
// hidden frame of the page, which talks to the page as a worker would. The theme asks for a script
// of this name, and takes `IFrameWorker` as the sign that its worker is in a frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const toPage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.postMessage = data => setTimeout(toPage, 0, data)
      inside.importScripts = async (...urls) => {
        for (const one of urls) await this.load(one)
      }
      this.ready = this.load(new URL(url, location.href).href)
    }

    // Run a script in the frame; the promise resolves when it has run.
    load(url) {
      const script = this.frame.contentDocument.createElement("script")
      return new Promise((resolve, reject) => {
        script.src = url
        script.onload = resolve
        script.onerror = () => reject(new Error(`${url} cannot be loaded`))
        this.frame.contentDocument.body.append(script)
      })
    }

    // Give the worker a message, once its script has run.
    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
